/*
The fence: who may write the outcome of a task.

One row, workers that claim it, and upkeep that takes claims back. Upkeep may take any worker for dead at any moment, the
worst that can happen to the fence. When it does is the business of heartbeats.pml. A worker that is frozen is one whose next step
comes late, and the checker tries every such delay. All statements wait for the disk, so a crash of the server loses no
commit: it loses answers.
*/

#include "common.pml"

#ifndef WORKERS
#define WORKERS 2
#endif
/* Deaths, lost answers, false alarms and retries, together. With more, the row begins to repeat itself. */
#ifndef FAULTS
#define FAULTS 3
#endif

#define NO_ATTEMPT (planted == 1) /* finds !zombie: an outcome is accepted whatever attempt the row carries */
#define NO_STATUS (planted == 2) /* finds !zombie: an outcome is accepted although the task is not RUNNING */
#define NOT_COUNTED (planted == 3) /* finds !zombie: a claim does not count an attempt */
#define NO_RECHECK (planted == 4) /* finds !two_claims: a claim does not look again at the row that it has locked */
#define RESCUE_BY_ID (planted == 5) /* finds !wrong_claim: a rescue looks only at the id of the row that it has locked */
#define NO_DIVISION (planted == 6) /* finds !effect_twice: a lost claim does not stop the COMMIT of an atomic task */
#define GIVE_BACK_ALL (planted == 7) /* finds !wrong_claim: also claims are given back whose answer is on its way */
#define NO_COMPARE (planted == 8) /* finds ends: nobody gives back claims whose answers were lost */
#define NO_RESCUE (planted == 9) /* finds ends: nobody takes claims back from dead workers */

#define READY 0
#define RUNNING 1
#define SUCCESSFUL 2
#define FAILED 3

/* What a worker does with its claim. */
#define IDLE 0
#define CHOSE 1
#define CLAIMED 2
#define HAS 3
#define RUNS 4
#define ENDED 5
#define WROTE 6
#define UNSURE 7
#define DEAD 8

#define NOBODY 255

/* The columns of the row. */
byte status = READY;
byte attempts = 0;
byte worker = NOBODY;

byte does[WORKERS];
/* The attempt of the claim that a worker has. */
byte claimed[WORKERS];
/* A claim that was sent over a session that is lost by now: the server may execute it later. */
bool late[WORKERS];
/* Whether the heartbeat has listed what is in flight, and nothing was. */
bool listed[WORKERS];
/* Whether the claim in the row is older than HEARTBEAT_LIMIT. */
bool old = false;
/* What the snapshot of a rescue shows; 0: nothing. */
byte orphan = 0;
byte faults = 0;
byte dead = 0;
bool is_atomic = false;
/* Committed effects of the function. */
byte effects = 0;

/* What must never be. */
bool zombie = false;
bool two_claims = false;
bool wrong_claim = false;
bool effect_twice = false;

/* Whose claim it is, whatever the columns say. */
byte holder = NOBODY;

#define is_finished (status == SUCCESSFUL || status == FAILED)
#define is_in_flight(me) (does[me] >= HAS && does[me] <= UNSURE)
/* Its answer is on its way, or it is in flight. */
#define has_claim(me) (does[me] >= CLAIMED && does[me] <= UNSURE)

/* store/ready.py: ready `status=TaskStatus.READY` */
inline choose(me) {
    does[me] == IDLE && status == READY;
    does[me] = CHOSE
}

/* store/claim.py: CLAIM `attempts = {next_attempt}` */
inline claim(me) {
    does[me] == CHOSE;
    if
    :: status == READY || NO_RECHECK ->
        take(me);
        claimed[me] = attempts;
        does[me] = CLAIMED
    :: else -> does[me] = IDLE
    fi
}

inline take(me) {
    must_not(two_claims, status != READY);
    status = RUNNING;
    attempts = attempts + (NOT_COUNTED -> (attempts == 0) : 1);
    worker = me;
    holder = me;
    old = false
}

/* worker/child/in_flight.py: begin_all */
inline hear_of_claim(me) {
    does[me] == CLAIMED;
    does[me] = HAS
}

/* worker/child/run.py: run */
inline begin(me) {
    does[me] == HAS;
    does[me] = RUNS
}

/* environment: the session is lost with the answer of the claim, before or after the claim is executed */
inline lose_answer_of_claim(me) {
    (does[me] == CLAIMED || does[me] == CHOSE) && faults < FAULTS;
    faults++;
    late[me] = (does[me] == CHOSE);
    does[me] = IDLE
}

/* environment: a claim is executed that nobody waits for any more, or it never reaches the server */
inline execute_late(me) {
    late[me];
    late[me] = false;
    if
    :: status == READY -> take(me)
    :: true
    fi
}

/* worker/child/run.py: run */
inline end(me) {
    does[me] == RUNS;
    effects = effects + !is_atomic;
    does[me] = ENDED
}

/* store/settle.py: SETTLE_SUCCESSES `AND task.attempts = (SELECT attempts FROM ended)`, SETTLE_SUCCESSES `AND task.status || '' = 'RUNNING'` */
#define is_held(me) ((attempts == claimed[me] || NO_ATTEMPT) && (status == RUNNING || NO_STATUS))

inline accept(me) {
    must_not(zombie, holder != me || status != RUNNING);
    holder = NOBODY
}

/* store/settle.py: SETTLE_SUCCESSES */
inline settle(me) {
    does[me] == ENDED && !is_atomic;
    if
    :: is_held(me) ->
        accept(me);
        status = SUCCESSFUL;
        does[me] = WROTE
    :: else -> does[me] = IDLE
    fi
}

/* store/settle.py: SETTLE_OWN_SUCCESS `SELECT 1 / count(*) FROM settled` */
inline settle_own(me) {
    does[me] == ENDED && is_atomic;
    if
    :: is_held(me) ->
        accept(me);
        status = SUCCESSFUL;
        effects++;
        does[me] = WROTE
    :: else -> effects = effects + NO_DIVISION; does[me] = IDLE
    fi;
    must_not(effect_twice, effects > 1 || (status == SUCCESSFUL && effects != 1))
}

/* store/settle.py: SETTLE_OTHERS `task.attempts = outcome.attempt AND task.status || '' = 'RUNNING'`; store/outcome.py: Retried, Interrupted */
inline settle_to_run_again(me) {
    (does[me] == RUNS && faults < FAULTS) || does[me] == UNSURE;
    if
    :: is_held(me) ->
        accept(me);
        faults = faults + (does[me] == RUNS);
        status = READY;
        worker = NOBODY
    :: else
    fi;
    does[me] = IDLE
}

/* store/settle.py: SETTLE_OTHERS; store/outcome.py: GivenBack; worker/child/in_flight.py: give_back_waiting */
inline release_unused(me) {
    does[me] == HAS && faults < FAULTS;
    faults++;
    if
    :: is_held(me) -> accept(me); status = READY; worker = NOBODY
    :: else
    fi;
    does[me] = IDLE
}

/* store/settle.py: SETTLE_OTHERS; store/outcome.py: Failed */
inline settle_failure(me) {
    does[me] == RUNS && faults < FAULTS;
    faults++;
    if
    :: is_held(me) -> accept(me); status = FAILED
    :: else
    fi;
    does[me] = IDLE
}

/* worker/child/settler.py: Settler */
inline hear_that_it_is_written(me) {
    does[me] == WROTE;
    does[me] = IDLE
}

/* environment: the answer is lost. The settler writes the outcome again; an atomic task does not know its end. */
inline lose_answer_of_settle(me) {
    does[me] == WROTE && faults < FAULTS;
    faults++;
    does[me] = (is_atomic -> UNSURE : ENDED)
}

/* environment: SIGKILL; another worker lives */
inline die(me) {
    does[me] != DEAD && dead < WORKERS - 1 && faults < FAULTS;
    faults++;
    dead++;
    does[me] = DEAD
}

/* store/rescue.py: RESCUE `SELECT owned.id, owned.attempts, owned.worker` */
inline look_for_orphans() {
    !NO_RESCUE && orphan == 0 && status == RUNNING && (does[worker] == DEAD || faults < FAULTS);
    faults = faults + (does[worker] != DEAD);
    orphan = attempts
}

/* store/rescue.py: RESCUE `AND task.attempts = orphan.attempts AND task.status || '' = 'RUNNING'` */
inline take_back() {
    orphan != 0;
    if
    :: (attempts == orphan || RESCUE_BY_ID) && status == RUNNING ->
        must_not(wrong_claim, attempts != orphan);
        status = READY;
        worker = NOBODY;
        holder = NOBODY
    :: else
    fi;
    orphan = 0
}

/* worker/child/in_flight.py: task_ids */
inline list_in_flight(me) {
    !NO_COMPARE && !listed[me] && status == RUNNING && worker == me && (old || GIVE_BACK_ALL) && !is_in_flight(me) && does[me] != DEAD;
    listed[me] = true
}

/* store/settle.py: GIVE_BACK `task.worker = %s AND task.id <> ALL (%s::bigint[])`; worker/child/feeder.py: _compare_if_due `older_than=limit` */
inline give_back(me) {
    listed[me] && does[me] != DEAD;
    listed[me] = false;
    if
    :: status == RUNNING && worker == me && (old || GIVE_BACK_ALL) ->
        must_not(wrong_claim, has_claim(me) && claimed[me] == attempts);
        status = READY;
        worker = NOBODY;
        holder = NOBODY
    :: else
    fi
}

/* environment: HEARTBEAT_LIMIT passes after a claim. By then an answer has come or the session is given up
   (worker/service.py: trouble), and the feeder is not between its list and its statement. */
inline grow_old() {
    status == RUNNING && !old && does[worker] != CLAIMED && !listed[worker];
    old = true
}

proctype Worker(byte me) {
    end_worker: do
    :: atomic { choose(me) }
    :: atomic { claim(me) }
    :: atomic { hear_of_claim(me) }
    :: atomic { begin(me) }
    :: atomic { lose_answer_of_claim(me) }
    :: atomic { end(me) }
    :: atomic { settle(me) }
    :: atomic { settle_own(me) }
    :: atomic { settle_to_run_again(me) }
    :: atomic { release_unused(me) }
    :: atomic { settle_failure(me) }
    :: atomic { hear_that_it_is_written(me) }
    :: atomic { lose_answer_of_settle(me) }
    :: atomic { die(me) }
    od
}

proctype Heartbeat(byte me) {
    end_heartbeat: do
    :: atomic { list_in_flight(me) }
    :: atomic { give_back(me) }
    :: atomic { execute_late(me) }
    od
}

proctype Upkeep() {
    end_upkeep: do
    :: atomic { look_for_orphans() }
    :: atomic { take_back() }
    od
}

proctype Time() {
    end_time: do
    :: atomic { grow_old() }
    od
}

init {
    atomic {
        start();
        if :: is_atomic = true :: true fi;
        byte each;
        for (each : 0 .. WORKERS - 1) { run Worker(each); run Heartbeat(each) }
        run Upkeep();
        run Time()
    }
}

ltl ends { <> is_finished }
