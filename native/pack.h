/* The packing pass: token rows to the fields of a training batch, each token read once. Plain C, no Python.
 *
 *   text of a row   t0 t1 t2 ... t(S-1) tS          S tokens and one more that is only ever a label
 *   tokens          t0 t1 t2 ... t(S-1)             pads become 0, so that an embedding can look them up
 *   labels          t1 t2 t3 ... tS                 the same, one further on
 *   keep            1 where labels[i] is a target   not a pad; not what follows an end of document (eod_mask_loss)
 *   loss_mask       keep as float32
 *   shift_labels    labels where keep, else -100    for a loss that compares logits[i] with target i
 *   hf_labels       shift_labels moved right by 1   for a model that compares logits[i-1] with target i
 *   position_ids    0 1 2 0 1 0 0 1 ...             counts from the start of the document, or of the row
 *   cu_seqlens      0 3 5 6 8 ...                   where documents end, counted over the joined rows
 *
 * Meaning after Megatron-LM (megatron/core/datasets/gpt_dataset.py): an end-of-document token belongs to the document
 * that it ends; a pad is recognised before it becomes 0.
 *
 * The pass works on blocks that stay in the L1 cache: a block is widened to int32 once, then every output is one
 * simple loop over it that any C compiler turns into SIMD code for the baseline x86-64 and aarch64. The cost is then
 * the memory that the outputs occupy (28 bytes a token), not the arithmetic: see Note [Fetch ahead]. */
#ifndef HEADRACE_PACK_H
#define HEADRACE_PACK_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* 256 tokens: 1 KB of text and 1 KB of keep flags stay in any L1 cache. Of 128 to 2048, 128 and 256 were the fastest at
 * 131072 tokens into rotating slots (0.8 to 0.9x memcpy of the outputs, 512: 0.9 to 1.0x, 1024: 1.0 to 1.1x; Xeon with
 * 48 KB L1 and 2 MB L2). */
enum { PACK_BLOCK_TOKENS = 256, PACK_SCAN_TOKENS = 32, PACK_STRIP_TOKENS = 64, CACHE_LINE_BYTES = 64 };

/* What labels hold where there is no target: cross_entropy's ignore_index in PyTorch. */
enum { PACK_IGNORED_LABEL = -100 };

/* What one call packs. Outputs hold num_rows * seq_length elements, cu_seqlens up to cu_capacity; NULL: not wanted. */
struct pack_job {
    const void *text; /* [num_rows, row_length] uint16 or int32 */
    bool text_is_uint16;
    int64_t num_rows, row_length, seq_length; /* row_length is seq_length or seq_length + 1 */

    int64_t *tokens, *labels, *position_ids, *shift_labels, *hf_labels;
    float *loss_mask;
    int32_t *cu_seqlens;
    int64_t cu_capacity;

    const int32_t *document_ends; /* over the joined rows, every row end among them; NULL: ends are eod tokens */
    const uint8_t *padding_rows;  /* [num_rows], 1: nothing in this row is a target; NULL: no such row */

    int32_t eod, pad;
    int32_t last_id; /* of the vocabulary, -1: not checked */
    bool reset_position_ids, reset_attention_mask, eod_mask_loss;
};

/* What the caller learns about the batch without reading it again. */
struct pack_counts {
    int64_t num_documents, max_seqlen, num_loss_tokens;
    int64_t num_valid_tokens; /* before the trailing pads of a row; 0 for a padding row */
    int64_t first_foreign;    /* index into text of the first id outside the vocabulary, -1: none */
};

/* A job under way. Positions count inside the row, ends over the joined rows. */
struct pack_pass {
    const struct pack_job *job;
    struct pack_counts *counts;
    int64_t row;
    int64_t positions_done, position_zero; /* positions are written up to here, counting from there */
    int64_t document_start;
    int64_t next_document; /* index into document_ends */
};

static bool pack_is_padding_row(const struct pack_pass *pass) {
    return pass->job->padding_rows && pass->job->padding_rows[pass->row];
}

static void pack_load(const struct pack_job *job, int64_t first, int64_t count, int32_t *restrict block) {
    if (job->text_is_uint16) {
        const uint16_t *restrict text = (const uint16_t *)job->text + first;
        for (int64_t i = 0; i < count; i++) block[i] = text[i];
    } else {
        memcpy(block, (const int32_t *)job->text + first, (size_t)count * sizeof *block);
    }
}

/* Note [Fetch ahead]
 * A store to a line that no cache holds waits until that line has been read. A block writes 1 or 2 KB of each output:
 * more streams, and shorter ones, than the hardware's prefetcher follows. So each strip asks for the same strip of the
 * next block. 131072 tokens into slots in DRAM, blocks of 512: 0.93x memcpy of the outputs with this, 1.2x without,
 * 1.0x when the next block is asked for all at once. Past the end of an output nothing happens: a prefetch never faults
 * and changes no byte.
 *
 * Returns where the strip that starts at element `start` ends. `out` points to that element. */
static inline int64_t pack_strip(const void *out, int64_t itemsize, int64_t start, int64_t count) {
    int64_t end = start + PACK_STRIP_TOKENS < count ? start + PACK_STRIP_TOKENS : count;
    uintptr_t ahead = (uintptr_t)out + (uintptr_t)(PACK_BLOCK_TOKENS * itemsize);
    for (int64_t byte = 0; byte < (end - start) * itemsize; byte += CACHE_LINE_BYTES)
        __builtin_prefetch((const void *)(ahead + (uintptr_t)byte), 1);
    return end;
}

static void pack_ids(int64_t *restrict out, const int32_t *restrict ids, int64_t count, int32_t pad) {
    for (int64_t i = 0; i < count;) {
        int64_t end = pack_strip(out + i, sizeof *out, i, count);
        for (; i < end; i++) out[i] = ids[i] == pad ? 0 : ids[i];
    }
}

/* keep[i] = 1 where the token after ids[i] is a target; returns how many are. */
static int64_t pack_keep(int32_t *restrict keep, const int32_t *restrict ids, int64_t count, int32_t pad, int32_t eod,
                         bool mask_after_eod) {
    int32_t kept = 0;
    if (mask_after_eod) {
        for (int64_t i = 0; i < count; i++) {
            keep[i] = (ids[i] != eod) & (ids[i + 1] != pad);
            kept += keep[i];
        }
    } else {
        for (int64_t i = 0; i < count; i++) {
            keep[i] = ids[i + 1] != pad;
            kept += keep[i];
        }
    }
    return kept;
}

static void pack_loss_mask(float *restrict out, const int32_t *restrict keep, int64_t count) {
    for (int64_t i = 0; i < count;) {
        int64_t end = pack_strip(out + i, sizeof *out, i, count);
        for (; i < end; i++) out[i] = (float)keep[i];
    }
}

static void pack_kept_labels(int64_t *restrict out, const int32_t *restrict labels, const int32_t *restrict keep,
                             int64_t count) {
    for (int64_t i = 0; i < count;) {
        int64_t end = pack_strip(out + i, sizeof *out, i, count);
        for (; i < end; i++) out[i] = keep[i] ? labels[i] : PACK_IGNORED_LABEL;
    }
}

static void pack_positions(int64_t *restrict out, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count;) {
        int64_t end = pack_strip(out + i, sizeof *out, i, count);
        for (; i < end; i++) out[i] = first + i;
    }
}

static bool pack_contains(const int32_t *ids, int64_t count, int32_t wanted) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= ids[i] == wanted;
    return found;
}

/* Is an id no token of the vocabulary? A pad never reaches the model, so it may lie outside. */
static bool pack_is_foreign(int32_t id, int32_t pad, int32_t last_id) {
    return ((id < 0) | (id > last_id)) & (id != pad);
}

static bool pack_has_foreign(const int32_t *ids, int64_t count, int32_t pad, int32_t last_id) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= pack_is_foreign(ids[i], pad, last_id);
    return found;
}

/* Positions up to `end` (inside the row) are written; those after it count on, or from 0 if a document ended. */
static void pack_fill_positions(struct pack_pass *pass, int64_t end, bool restart) {
    if (pass->job->position_ids) {
        int64_t done = pass->positions_done;
        pack_positions(pass->job->position_ids + pass->row * pass->job->seq_length + done, done - pass->position_zero,
                       end - done);
    }
    pass->positions_done = end;
    if (restart) pass->position_zero = end;
}

/* A segment of attention ends at `end`, counted over the joined rows. A list too short is counted on, never written
 * past its end: the caller sees num_documents + 1 > cu_capacity. */
static void pack_end_document(struct pack_pass *pass, int64_t end) {
    struct pack_counts *counts = pass->counts;
    int64_t length = end - pass->document_start;
    if (length > counts->max_seqlen) counts->max_seqlen = length;
    counts->num_documents++;
    if (counts->num_documents < pass->job->cu_capacity) pass->job->cu_seqlens[counts->num_documents] = (int32_t)end;
    pass->document_start = end;
}

/* The documents that end inside this block, by the caller's list. */
static void pack_follow_list(struct pack_pass *pass, int64_t block_end) {
    const struct pack_job *job = pass->job;
    int64_t row_start = pass->row * job->seq_length, last = job->num_rows * job->seq_length;
    while (pass->document_start < last && job->document_ends[pass->next_document] <= row_start + block_end) {
        int64_t end = job->document_ends[pass->next_document++];
        pack_fill_positions(pass, end - row_start, true);
        pack_end_document(pass, end);
    }
}

/* The documents that end inside this block, by their eod tokens. Ends are rare: look for them 32 tokens at a time. */
static void pack_follow_eod(struct pack_pass *pass, const int32_t *ids, int64_t block_start, int64_t count) {
    const struct pack_job *job = pass->job;
    int64_t row_start = pass->row * job->seq_length;
    for (int64_t scan = 0; scan < count; scan += PACK_SCAN_TOKENS) {
        int64_t scanned = count - scan < PACK_SCAN_TOKENS ? count - scan : PACK_SCAN_TOKENS;
        if (!pack_contains(ids + scan, scanned, job->eod)) continue;
        for (int64_t i = scan; i < scan + scanned; i++) {
            if (ids[i] != job->eod) continue;
            if (job->reset_position_ids) pack_fill_positions(pass, block_start + i + 1, true);
            if (job->reset_attention_mask) pack_end_document(pass, row_start + block_start + i + 1);
        }
    }
}

/* One block: `ids` holds its tokens and the label of the last one. */
static void pack_block(struct pack_pass *pass, const int32_t *ids, int32_t *keep, int64_t block_start, int64_t count) {
    const struct pack_job *job = pass->job;
    int64_t at = pass->row * job->seq_length + block_start;
    if (job->tokens) pack_ids(job->tokens + at, ids, count, job->pad);
    if (job->labels) pack_ids(job->labels + at, ids + 1, count, job->pad);

    if (pack_is_padding_row(pass)) {
        memset(keep, 0, (size_t)count * sizeof *keep);
    } else {
        pass->counts->num_loss_tokens += pack_keep(keep, ids, count, job->pad, job->eod, job->eod_mask_loss);
    }
    if (job->loss_mask) pack_loss_mask(job->loss_mask + at, keep, count);
    if (job->shift_labels) pack_kept_labels(job->shift_labels + at, ids + 1, keep, count);
    if (job->hf_labels) {
        if (block_start == 0) job->hf_labels[at] = PACK_IGNORED_LABEL; /* nothing comes before it to predict it */
        int64_t moved = block_start + count == job->seq_length ? count - 1 : count;
        pack_kept_labels(job->hf_labels + at + 1, ids + 1, keep, moved);
    }

    if (job->document_ends) {
        pack_follow_list(pass, block_start + count);
    } else if (job->reset_position_ids || job->reset_attention_mask) {
        pack_follow_eod(pass, ids, block_start, count);
    }
    pack_fill_positions(pass, block_start + count, false);
}

static void pack_find_foreign(const struct pack_job *job, const int32_t *ids, int64_t first, int64_t count,
                              struct pack_counts *counts) {
    for (int64_t i = 0; i < count && counts->first_foreign < 0; i++)
        if (pack_is_foreign(ids[i], job->pad, job->last_id)) counts->first_foreign = first + i;
}

/* Tokens of a row before its trailing pads. Only the tail is looked at. */
static int64_t pack_valid_tokens(const struct pack_job *job, int64_t row) {
    int64_t valid = job->seq_length, first = row * job->row_length;
    int32_t id;
    while (valid > 0 && (pack_load(job, first + valid - 1, 1, &id), id == job->pad)) valid--;
    return valid;
}

static void pack_row(struct pack_pass *pass) {
    const struct pack_job *job = pass->job;
    int64_t text_start = pass->row * job->row_length;
    _Alignas(64) int32_t ids[PACK_BLOCK_TOKENS + 1];
    _Alignas(64) int32_t keep[PACK_BLOCK_TOKENS];
    for (int64_t start = 0; start < job->seq_length; start += PACK_BLOCK_TOKENS) {
        int64_t left = job->seq_length - start;
        int64_t count = left < PACK_BLOCK_TOKENS ? left : PACK_BLOCK_TOKENS;
        int64_t loaded = start + count < job->row_length ? count + 1 : count;
        pack_load(job, text_start + start, loaded, ids);
        if (job->last_id >= 0 && pack_has_foreign(ids, loaded, job->pad, job->last_id))
            pack_find_foreign(job, ids, text_start + start, loaded, pass->counts);
        if (loaded == count) ids[count] = job->pad; /* a row without the extra token has no label for its last one */
        pack_block(pass, ids, keep, start, count);
    }
}

/* Fills the outputs of `job` and `counts`. The caller has checked every size; nothing is allocated, nothing kept. */
static void pack_rows(const struct pack_job *job, struct pack_counts *counts) {
    struct pack_pass pass = {.job = job, .counts = counts};
    *counts = (struct pack_counts){.first_foreign = -1};
    if (job->cu_capacity > 0) job->cu_seqlens[0] = 0;
    for (pass.row = 0; pass.row < job->num_rows; pass.row++) {
        int64_t row_end = (pass.row + 1) * job->seq_length;
        pass.positions_done = pass.position_zero = 0;
        pack_row(&pass);
        if (pass.document_start < row_end) pack_end_document(&pass, row_end); /* rows never share a document */
        if (!pack_is_padding_row(&pass)) counts->num_valid_tokens += pack_valid_tokens(job, pass.row);
    }
}

#endif
