/* native/ring.h for SPIN: one writer, READERS readers, SLOTS slots, VERSIONS versions of which the last is END.
 *
 *   spin -a ring.pml && gcc -O2 -DSAFETY -DCOLLAPSE pan.c -o pan && ./pan -m100000              no error
 *   spin -a -DMUTANT=3 ring.pml && gcc -O2 -DSAFETY -DCOLLAPSE pan.c -o pan && ./pan -m100000   an error
 *
 * -DREADERS=1|2 -DSLOTS= -DHOLD= -DVERSIONS= choose the size; -DDEATHS=2 lets any processes die instead of any one.
 *
 * Checked in every reachable state:
 *   - no slot is written while a living reader may read it, and a reader finds in a slot what was published there (asserts);
 *   - every reader takes 0, 1, 2, ... (by construction of `next`, and the slot's content asserts it);
 *   - nobody sleeps for ever: SPIN reports any state from which nothing moves and somebody has not come to his end.
 *     A sleeper is woken by a futex call, or by the death of a peer that it needs (the 100 ms tick that polls pidfds). The
 *     tick wakes nobody else here: in real life it would hide a lost wake-up behind a delay, here it is an error;
 *   - a death ends in an exception for whoever still needs the dead, an exception is raised only after a death, and after
 *     the writer's death all readers stop at one version.
 *
 * Memory order: every access is one step, so this is sequential consistency, which ring.h asks for (seq_cst) where two
 * processes each store and then look at the other's word. `published` needs no more than release.
 *
 * The mistakes:
 *   1  publish before the slot is written (what a relaxed store of `published` would allow)
 *   2  release before the reading has ended
 *   3  the writer sleeps without a second look and without the kernel's comparison
 *   4  the writer waits for one version more than readers ever hand back
 *   5  the writer takes a slot one version too early
 *   6  store buffer: a reader's `released` is seen only after it has looked at `wanted`
 *   7  store buffer: the writer's `wanted` is seen only after it has looked at `released`
 *   8  store buffer: the two last readers each look before they see the other's `released`
 *   9  readers of a dead writer do not drain what it has published
 *  10  the writer does not look whether its readers live (with one reader: with two, the other one tells)
 *  11  a reader sleeps without the kernel's comparison
 */
#ifndef READERS
#define READERS 2
#endif
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef HOLD
#define HOLD 1
#endif
#ifndef VERSIONS
#define VERSIONS 4
#endif
#ifndef MUTANT
#define MUTANT 0
#endif

#define LEFT 100
#define GARBAGE 99
#define RUNNING 0
#define READER_GONE 1
/* hr_watermark */
#define HALF (SLOTS / 2)
#define REACHABLE (SLOTS - HOLD)
#define LEAST (HALF < REACHABLE -> HALF : REACHABLE)
#define WATERMARK (LEAST > 1 -> LEAST : 1)

/* shared memory */
byte published, fate;
bool event_moved; /* has `event` changed since the writer read it? More than that nobody asks of the counter */
byte wanted = LEFT;
byte released[READERS];
byte slot[SLOTS];

/* the kernel: who sleeps, and who has died */
bool writer_sleeps, reader_sleeps[READERS];
bool writer_dead, reader_dead[READERS];

/* what the properties speak of, invisible to the protocol */
byte low[READERS];      /* the least version that this reader may still read */
byte stopped_at[READERS];
bool raised[READERS], writer_raised, done[READERS];
bool releasing[READERS]; /* between its store to `released` and the end of hr_release */

#define DEAD_READER_0 (reader_dead[0] && released[0] != LEFT)
#if READERS > 1
#define DEAD_READER_1 (reader_dead[1] && released[1] != LEFT)
#else
#define DEAD_READER_1 false
#endif
/* Whoever released last has woken a writer that sleeps for no reason any more. The next release would wake it as well, so
 * a lost wake-up freezes nobody; it would cost a training step, though, and does not happen. */
#define NO_LOST_WAKE_UP \
    assert(!writer_sleeps || releasing[0] || releasing[READERS - 1] || reader_dead[0] || reader_dead[READERS - 1] || \
           released[0] < wanted || released[READERS - 1] < wanted)
#define READER_NEEDED_IS_DEAD (DEAD_READER_0 || DEAD_READER_1)

inline wake_writer() {
    event_moved = true;
    writer_sleeps = false
}

inline wake_readers() {
    d_step {
        reader_sleeps[0] = false;
        reader_sleeps[READERS - 1] = false
    }
}

/* hr_min_released: reads one line after the other, and the readers may move in between. */
inline read_min_released(least) {
    least = released[0];
    if
    :: READERS > 1 && released[READERS - 1] < least -> least = released[READERS - 1]
    :: else
    fi
}

inline set_fate() {
    if
    :: fate == RUNNING -> fate = READER_GONE
    :: else
    fi;
    wake_readers();
    wake_writer()
}

proctype Writer() {
    byte next, least;
    {
        do
        :: next == VERSIONS -> break
        :: else ->
            /* begin: hr_slot_is_free, else hr_wait_for_slot */
            do
            :: true ->
#if MUTANT == 5
                read_min_released(least);
                if :: next < SLOTS || least + SLOTS >= next -> break :: else fi;
#else
                read_min_released(least);
                if :: next < SLOTS || least + SLOTS >= next + 1 -> break :: else fi;
#endif
#if MUTANT != 10
                if
                :: READER_NEEDED_IS_DEAD -> set_fate()
                :: else
                fi;
#endif
                if
                :: fate != RUNNING -> writer_raised = true; goto out
                :: else
                fi;
                event_moved = false;
#if MUTANT == 4
                wanted = next - HOLD + 2; /* one more than readers hand back, even those that wait */
                read_min_released(least);
#elif MUTANT == 7
                read_min_released(least);
                wanted = next - SLOTS + WATERMARK;
#else
                wanted = next - SLOTS + WATERMARK;
                read_min_released(least);
#endif
#if MUTANT == 3
                least = 0;
#endif
                if
                :: least < wanted && fate == RUNNING ->
                    /* futex: the kernel compares and sleeps in one step */
#if MUTANT == 3
                    writer_sleeps = true;
#else
                    d_step { if :: !event_moved -> writer_sleeps = true :: else fi };
#endif
                    if
                    :: !writer_sleeps
#if MUTANT != 10
                    :: READER_NEEDED_IS_DEAD
#endif
                    fi;
                    writer_sleeps = false
                :: else
                fi;
                wanted = LEFT
            od;
            if
            :: least == LEFT -> goto out /* everybody left */
            :: fate != RUNNING -> writer_raised = true; goto out
            :: else
            fi;
            /* write, then publish */
#if MUTANT == 1
            published = next + 1;
            wake_readers();
#endif
            assert(reader_dead[0] || low[0] == LEFT || low[0] + SLOTS > next);
            assert(reader_dead[READERS - 1] || low[READERS - 1] == LEFT || low[READERS - 1] + SLOTS > next);
            slot[next % SLOTS] = GARBAGE;
            slot[next % SLOTS] = next;
#if MUTANT != 1
            published = next + 1;
            wake_readers();
#endif
            next++
        od;
out:    assert(!writer_raised || reader_dead[0] || reader_dead[READERS - 1])
    } unless { writer_dead }
}

proctype Reader(byte me) {
    byte next, least, seen, count, ahead;
    {
        do
        :: true ->
            /* release all but the last HOLD - 1 versions: hr_release */
            count = (next + 1 > HOLD -> next + 1 - HOLD : 0);
            if
            :: count > released[me] ->
                releasing[me] = true;
#if MUTANT == 2
                released[me] = count;
#else
                low[me] = count;
#endif
#if MUTANT == 6
                ahead = wanted; /* looked before the store was seen */
                released[me] = count;
                if
                :: count >= ahead ->
                    read_min_released(least);
                    if :: least >= ahead -> wake_writer() :: else fi
                :: else
                fi;
#elif MUTANT == 8
                /* the store reaches the others only after we have looked at theirs */
                ahead = wanted;
                least = count;
                if
                :: READERS > 1 && released[READERS - 1 - me] < least -> least = released[READERS - 1 - me]
                :: else
                fi;
                released[me] = count;
                if :: count >= ahead && least >= ahead -> wake_writer() :: else fi;
#else
                released[me] = count;
                ahead = wanted;
                if
                :: count >= ahead ->
                    read_min_released(least);
                    if :: least >= ahead -> wake_writer() :: else fi
                :: else
                fi;
#endif
#if MUTANT == 2
                assert(slot[(count - 1) % SLOTS] == count - 1);
                low[me] = count;
#endif
            :: else
            fi;
            d_step { count = 0; ahead = 0; least = 0; releasing[me] = false; NO_LOST_WAKE_UP };
            /* wait for version `next`: hr_wait_for_version */
            do
            :: true ->
                seen = published;
                if :: seen > next -> break :: else fi;
                if
                :: READER_NEEDED_IS_DEAD && !writer_dead -> set_fate()
                :: else
                fi;
                if
                :: fate != RUNNING -> raised[me] = true; goto out
#if MUTANT == 9
                :: writer_dead -> raised[me] = true; goto out
#else
                :: writer_dead && published <= next -> raised[me] = true; goto out
#endif
                :: else
                fi;
#if MUTANT == 11
                reader_sleeps[me] = true;
#else
                d_step { if :: published == seen -> reader_sleeps[me] = true :: else fi };
#endif
                if
                :: !reader_sleeps[me]
                :: writer_dead || READER_NEEDED_IS_DEAD
                fi;
                reader_sleeps[me] = false
            od;
            if
            :: fate != RUNNING -> raised[me] = true; goto out
            :: else
            fi;
            /* take */
            seen = 0;
            assert(slot[next % SLOTS] == next);
            next++;
            if
            :: next == VERSIONS -> /* END: leave */
                low[me] = LEFT;
                released[me] = LEFT;
                wake_writer();
                done[me] = true;
                break
            :: else
            fi;
            /* ... the user reads; what is held must not change */
            assert(slot[(next - 1) % SLOTS] == next - 1);
#if HOLD > 1
            if :: next > 1 -> assert(slot[(next - 2) % SLOTS] == next - 2) :: else fi
#endif
        od;
out:    stopped_at[me] = next;
        assert(!raised[me] || writer_dead || reader_dead[0] || reader_dead[READERS - 1])
    } unless { reader_dead[me] }
}

/* One process may die, at any moment of the others; with -DDEATHS=2 any of them may. */
proctype Death() {
#if DEATHS == 2
    if :: writer_dead = true :: skip fi;
    if :: reader_dead[0] = true :: skip fi;
    if :: reader_dead[READERS - 1] = true :: skip fi
#else
    if
    :: writer_dead = true
    :: reader_dead[0] = true
    :: reader_dead[READERS - 1] = true
    :: skip
    fi
#endif
}

init {
    atomic {
        byte r = 0;
        do :: r < SLOTS -> slot[r] = GARBAGE; r++ :: else -> break od;
        run Writer();
        run Reader(0);
#if READERS > 1
        run Reader(1);
#endif
        run Death()
    };
    /* Only when all others have come to an end: */
    (_nr_pr == 1);
#if READERS > 1
    /* a dead writer is drained: readers that live stop at one version */
    assert(reader_dead[0] || reader_dead[1] || stopped_at[0] == stopped_at[1]);
#endif
    assert(reader_dead[0] || done[0] || raised[0])
}
