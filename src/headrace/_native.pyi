"""What native/ offers. Reference: the comments of native/*.c."""

from collections.abc import Sequence
from typing import Any, Self, final

from numpy.typing import NDArray
from typing_extensions import Buffer

LAYOUT_VERSION: int
LINE_BYTES: int
MAX_READERS: int
MAX_SLOTS: int
NUM_COUNTS: int
MAX_RAGGED: int
CONTROL_BYTES: int
DESCRIPTOR_BYTES: int
FIELD_BYTES: int
RUNNING: int
WRITER_LEFT: int
READER_GONE: int
DATA: int
END: int
ERROR: int
RESIZE: int
LEFT: int

@final
class Mapping(Buffer):
    def __new__(cls, fd: int, nbytes: int, alignment: int, writable: bool) -> Mapping: ...
    def close(self) -> None: ...
    def advise(self, advice: int) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def exports(self) -> int: ...

class _End:
    def use_data(self, mapping: Buffer, slot_bytes: int, /) -> None: ...
    def watch(self, pidfds: tuple[int, ...], /) -> None: ...
    def set_fate(self, state: int, /) -> bool: ...
    def close(self) -> None: ...
    @property
    def published(self) -> int: ...
    @property
    def released(self) -> tuple[int, ...]: ...
    @property
    def state(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def num_waits(self) -> int: ...
    @property
    def wait_ns(self) -> int: ...

Delivery = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]

@final
class RingWriter(_End):
    def __new__(
        cls,
        control: Buffer,
        num_slots: int,
        num_readers: int,
        hold: int,
        generation: int,
        writer_pid: int,
        writer_start_time: int,
    ) -> RingWriter: ...
    def begin(self, timeout_s: float, /) -> int | None: ...
    def publish(
        self,
        kind: int,
        layout_id: int,
        num_fields: int,
        used_bytes: int,
        blob_offset: int,
        blob_bytes: int,
        counts: tuple[int, ...],
        lengths: tuple[int, ...],
    ) -> int: ...

@final
class RingReader(_End):
    def __new__(cls, control: Buffer, index: int, pid: int, start_time: int) -> RingReader: ...
    def next(self, timeout_s: float, /) -> Delivery | None: ...
    def release(self, count: int, /) -> None: ...
    def leave(self) -> None: ...
    def disown(self) -> None: ...

# batch.c
class Batch:
    index: int
    consumed_samples: int
    max_seqlen: int
    num_documents: int
    num_loss_tokens: int
    num_valid_tokens: int
    _arrays: dict[str, Any]
    _counts: tuple[int, ...]
    _is_valid: bool
    _lender: Lender | None
    _memory: NDArray[Any] | None
    _metadata: Any
    _ends: tuple[int, ...] | None
    def __new__(
        cls,
        arrays: dict[str, Any],
        index: int,
        counts: tuple[int, ...],
        lender: Lender | None,
        memory: NDArray[Any] | None,
        metadata: Any = None,
        ends: tuple[int, ...] | None = None,
    ) -> Self: ...
    def __getitem__(self, name: str, /) -> Any: ...

class Lender:
    _hold: int
    _num_delivered: int
    _oldest_valid: int
    _consumed_samples: int
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def _lend_from(
        self, reader: RingReader, known: dict[tuple[int, ...], Any], batch_type: type[Batch], timeout_s: float, /
    ) -> None: ...

# pack.c
RESET_POSITION_IDS: int
RESET_ATTENTION_MASK: int
EOD_MASK_LOSS: int

def pack(
    rows: NDArray[Any],
    outputs: tuple[NDArray[Any] | None, ...],
    document_ends: NDArray[Any] | None,
    padding_rows: bytes | None,
    seq_length: int,
    eod: int,
    pad: int,
    last_id: int,
    flags: int,
    /,
) -> tuple[int, int, int, int, int]: ...
def zigzag_runs(
    cu_seqlens: NDArray[Any], padded: NDArray[Any], runs: NDArray[Any], multiple: int, cp_size: int, cp_rank: int, /
) -> tuple[int, int, int, int]: ...
def cut(
    fields: Sequence[tuple[NDArray[Any], NDArray[Any], int, int, int]], runs: NDArray[Any], num_runs: int, shift: int, /
) -> None: ...

# order.c
def draw_blend(
    shares: NDArray[Any], limits: NDArray[Any], corpus_index: NDArray[Any], corpus_sample_index: NDArray[Any], /
) -> None: ...
def index_samples(lengths: NDArray[Any], sample_index: NDArray[Any], sequence_length: int, extra: int, /) -> None: ...
