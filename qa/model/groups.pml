/*
Groups: the waiting tasks of one group are claimed together, and one call of the function runs them.

A worker claims the first task of a call, and then the others. Admission is one step here: keys.pml is about it.
A process that freezes is one whose next step comes late.
*/

#include "common.pml"

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef TASKS
#define TASKS 2
#endif
/* Deaths, false alarms, lost answers, retries and calls given back, together. */
#ifndef FAULTS
#define FAULTS 2
#endif
#define EACH each : 0 .. TASKS - 1

#define FIRST_UNCHECKED (planted == 1) /* finds !two_calls: the others are claimed without a look at the claim on the first */
#define FIRST_ALONE (planted == 2) /* finds !two_calls: admission does not count the others of a call */
#define NO_ROW_LOCK (planted == 3) /* finds !ended_runs: the others are claimed as the snapshot shows them */
#define FENCE_OF_FIRST (planted == 4) /* finds !wrong_outcome: the outcome of the others is accepted with that of the first */
#define GIVE_BACK_CLAIMING (planted == 5) /* finds !wrong_claim: claims are given back whose answer is on its way */
#define NO_GIVE_BACK (planted == 6) /* finds all_end: claims whose answer was lost stay */
#define RESCUE_FIRST (planted == 7) /* finds all_end: only the first task of a call is taken back */

#define NOT_THERE 0
#define BLOCKED 1
#define READY 2
#define RUNNING 3
#define SCHEDULED 4
#define FINISHED 5

#define NOBODY 255

byte status[TASKS];
byte attempts[TASKS];
byte worker[TASKS] = NOBODY;
/* The row is locked by the open transaction of a person. */
bool is_locked[TASKS];
/* Whether the person has cancelled already. */
bool cancels = false;

#define IDLE 0
#define HAS_FIRST 1
#define LOOKED 2
#define TAKEN 3
#define CALLS 4
#define DEAD 5
byte does[WORKERS];
byte first[WORKERS];
/* The attempts of the claims that a worker has, by task; 0: no claim. */
typedef Claims { byte attempt[TASKS] };
Claims mine[WORKERS];
/* What a snapshot has shown as waiting; then what was claimed, and the answer is on its way. */
typedef Found { bool is_in[TASKS] };
Found found[WORKERS];
byte faults = 0;

/* For one step; the same before and after it. */
byte each = 0;
byte other = 0;
bool is_busy = false;

bool two_calls = false;
bool ended_runs = false;
bool wrong_outcome = false;
bool wrong_claim = false;

#define has_claim(me, task) (status[task] == RUNNING && worker[task] == me && attempts[task] == mine[me].attempt[task])
/* Whether the table says that a worker runs something. */
#define has(me, task) (status[task] == RUNNING && worker[task] == me)
#define runs(me) (has(me, 0) || has(me, 1) || has(me, TASKS - 1))
#define holds(task) (status[task] == READY || (status[task] == RUNNING && (!FIRST_ALONE || task == first[worker[task]])))
#define is_claiming(me) (does[me] == HAS_FIRST || does[me] == LOOKED || does[me] == TAKEN)

/* READY is one call to come, and what one worker runs is one call. */
inline check() {
    for (EACH) {
        for (other : 0 .. TASKS - 1) {
            must_not(two_calls, each != other && ((status[each] == READY && (status[other] == READY || status[other] == RUNNING)) || (status[each] == RUNNING && status[other] == RUNNING && worker[each] != worker[other])))
        }
    }
    each = 0;
    other = 0
}

inline clear(me) {
    for (EACH) { mine[me].attempt[each] = 0; found[me].is_in[each] = false }
    each = 0
}

/* store/insert_tasks.py: columns_of `columns["status"] = "'BLOCKED'"` */
inline insert(task) {
    status[task] == NOT_THERE && (task == 0 || status[task - 1] != NOT_THERE);
    status[task] = BLOCKED
}

/* store/admit.py: ADMIT_NEXT `BETWEEN (keys.key, 'READY') AND (keys.key, 'SCHEDULED')`, ADMIT `NOT starts_with(head.key, '{_GROUPED}')`; worker/parent/upkeep.py: _orphaned_keys */
inline admit(task) {
    status[task] == BLOCKED && !is_locked[task] && !(holds(0) || holds(1) || holds(TASKS - 1)) &&
        (task == 0 || status[0] != BLOCKED) && (task < 2 || status[1] != BLOCKED);
    status[task] = READY;
    check()
}

/* store/claim.py: CLAIM `task.status = 'READY'`, CLAIM `attempts = {next_attempt}` */
inline claim(me, task) {
    does[me] == IDLE && status[task] == READY;
    status[task] = RUNNING;
    worker[task] = me;
    attempts[task]++;
    mine[me].attempt[task] = attempts[task];
    first[me] = task;
    does[me] = HAS_FIRST;
    check()
}

/* store/claim.py: CLAIM_GROUP `BETWEEN (%s, 'BLOCKED') AND (%s, 'BLOCKED')`; worker/child/executor.py: include_others `in_flight.claiming_groups[first.claim]` */
inline look(me) {
    does[me] == HAS_FIRST;
    for (EACH) { found[me].is_in[each] = (status[each] == BLOCKED) }
    each = 0;
    does[me] = LOOKED
}

/* store/claim.py: CLAIM_GROUP `WHERE id = %s AND attempts = %s AND status || '' = 'RUNNING' FOR NO KEY UPDATE`, CLAIM_GROUP `FOR NO KEY UPDATE SKIP LOCKED` */
inline take_along(me) {
    does[me] == LOOKED;
    is_busy = !has_claim(me, first[me]) && !FIRST_UNCHECKED;
    for (EACH) {
        if
        :: found[me].is_in[each] && !is_busy && ((status[each] == BLOCKED && !is_locked[each]) || NO_ROW_LOCK) ->
            must_not(ended_runs, status[each] == FINISHED);
            status[each] = RUNNING;
            worker[each] = me;
            attempts[each]++
        :: else -> found[me].is_in[each] = false
        fi
    }
    each = 0;
    is_busy = false;
    does[me] = TAKEN;
    check()
}

/* worker/child/executor.py: include_others `in_flight.add(claims)` */
inline hear_of_others(me) {
    does[me] == TAKEN;
    for (EACH) {
        mine[me].attempt[each] = (found[me].is_in[each] -> attempts[each] : mine[me].attempt[each]);
        found[me].is_in[each] = false
    }
    each = 0;
    does[me] = CALLS
}

/* environment: the answer is lost; worker/child/executor.py: include_others `in_flight.changed_at = time.monotonic()` */
inline lose_answer(me) {
    does[me] == TAKEN && faults < FAULTS;
    faults++;
    status[first[me]] = (has_claim(me, first[me]) -> BLOCKED : status[first[me]]);
    does[me] = IDLE;
    clear(me)
}

/* store/settle.py: SETTLE_SUCCESSES `AND task.attempts = (SELECT attempts FROM ended)`, SETTLE_SUCCESSES `AND task.status || '' = 'RUNNING'`; worker/child/attempt.py: with_outcomes `zip(self.claims, each, strict=True)` */
inline finish(me) {
    does[me] == CALLS;
    for (EACH) {
        if
        :: mine[me].attempt[each] && status[each] == RUNNING && (has_claim(me, each) || FENCE_OF_FIRST) ->
            must_not(wrong_outcome, !has_claim(me, each));
            status[each] = FINISHED
        :: else
        fi
    }
    each = 0;
    does[me] = IDLE;
    clear(me)
}

/* store/settle.py: SETTLE_OTHERS `THEN 'BLOCKED'`; store/outcome.py: GivenBack; worker/child/attempt.py: _outcomes_for `outcome = GivenBack()` */
inline release(me) {
    does[me] == CALLS && faults < FAULTS;
    faults++;
    for (EACH) { status[each] = (has_claim(me, each) -> BLOCKED : status[each]) }
    each = 0;
    does[me] = IDLE;
    clear(me)
}

/* worker/child/attempt.py: _outcomes_for `other.failure(self.error) for other in self.others`: some may be retried and others not; store/outcome.py: Retried */
inline fail(me) {
    does[me] == CALLS && faults < FAULTS;
    faults++;
    for (EACH) {
        if
        :: has_claim(me, each) -> status[each] = SCHEDULED
        :: has_claim(me, each) -> status[each] = FINISHED
        :: !has_claim(me, each)
        fi
    }
    each = 0;
    does[me] = IDLE;
    clear(me)
}

/* store/release.py: promote `admit_on_commit(using` */
inline promote(task) {
    status[task] == SCHEDULED;
    status[task] = BLOCKED
}

/* environment: SIGKILL; another worker lives */
inline die(me) {
    does[me] != DEAD && does[WORKERS - 1 - me] != DEAD && faults < FAULTS;
    faults++;
    does[me] = DEAD;
    clear(me)
}

/* store/rescue.py: RESCUE `AND NOT EXISTS (SELECT FROM alive WHERE alive.id = busy.worker)` */
inline rescue(me) {
    runs(me) && (does[me] == DEAD || faults < FAULTS);
    faults = faults + (does[me] != DEAD);
    for (EACH) {
        if
        :: status[each] == RUNNING && worker[each] == me && (!RESCUE_FIRST || each == first[me]) ->
            status[each] = BLOCKED;
            worker[each] = NOBODY
        :: else
        fi
    }
    each = 0
}

/* store/settle.py: GIVE_BACK `COALESCE(task.lock_key <> ALL (%s::text[]), true)`; worker/child/in_flight.py: task_ids */
inline give_back(me, task) {
    does[me] != DEAD && status[task] == RUNNING && worker[task] == me && mine[me].attempt[task] != attempts[task] &&
        (!is_claiming(me) || GIVE_BACK_CLAIMING) && !NO_GIVE_BACK;
    must_not(wrong_claim, does[me] == TAKEN && found[me].is_in[task]);
    status[task] = BLOCKED;
    worker[task] = NOBODY
}

/* store/operate.py: _change_free; store/marking.py: first_free */
inline lock_row(task) {
    status[task] == BLOCKED && !is_locked[task] && !cancels;
    cancels = true;
    is_locked[task] = true
}

/* store/operate.py: _change_free `admit_on_commit(rows.db` */
inline commit_cancel(task) {
    is_locked[task];
    is_locked[task] = false;
    status[task] = FINISHED
}

/* environment: a person's transaction is rolled back */
inline roll_back(task) {
    is_locked[task];
    is_locked[task] = false
}

proctype Worker(byte me) {
    end_worker: do
    :: atomic { claim(me, 0) }
    :: atomic { claim(me, 1) }
    :: atomic { look(me) }
    :: atomic { take_along(me) }
    :: atomic { hear_of_others(me) }
    :: atomic { lose_answer(me) }
    :: atomic { finish(me) }
    :: atomic { release(me) }
    :: atomic { fail(me) }
    :: atomic { die(me) }
#if TASKS > 2
    :: atomic { claim(me, 2) }
#endif
    od
}

/* What runs beside the workers: heartbeats and upkeep. */
proctype Upkeep() {
    end_upkeep: do
    :: atomic { rescue(0) }
    :: atomic { rescue(1) }
    :: atomic { give_back(0, 0) }
    :: atomic { give_back(0, 1) }
    :: atomic { give_back(1, 0) }
    :: atomic { give_back(1, 1) }
    :: atomic { admit(0) }
    :: atomic { admit(1) }
    :: atomic { promote(0) }
    :: atomic { promote(1) }
#if TASKS > 2
    :: atomic { give_back(0, 2) }
    :: atomic { give_back(1, 2) }
    :: atomic { admit(2) }
    :: atomic { promote(2) }
#endif
    od
}

proctype Person() {
    end_person: do
    :: atomic { insert(0) }
    :: atomic { insert(1) }
    :: atomic { lock_row(1) }
    :: atomic { commit_cancel(1) }
    :: atomic { roll_back(1) }
#if TASKS > 2
    :: atomic { insert(2) }
#endif
    od
}

init {
    atomic {
        start();
        if :: true :: cancels = true fi;
        run Worker(0);
        run Worker(1);
        run Upkeep();
        run Person()
    }
}

#define ended(task) (status[task] == FINISHED)
ltl all_end { <> (ended(0) && ended(1)) }
