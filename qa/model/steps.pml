/*
Steps: a task records an atomic step, begins to wait for an event, and ends when the event or its timeout has come.

A process that freezes is one whose next step comes late. Children are released as the tasks of after= are.
*/

#include "common.pml"

#ifndef WORKERS
#define WORKERS 2
#endif
/* Deaths and false alarms, together. */
#ifndef FAULTS
#define FAULTS 2
#endif

#define NO_FENCE (planted == 1) /* finds !late_record: a record is written whoever has the claim */
#define NO_REFUSAL (planted == 2) /* finds !two_effects: a transaction is committed although another has recorded its step */
#define ENDS_AGAIN (planted == 3) /* finds !two_ends: a wait that has ended is ended again */
#define WAKES_RUNNING (planted == 4) /* finds !wrong_wake: an event makes a task ready that runs */
#define NO_LOOK (planted == 5) /* finds ends: a worker that suspends a task does not look for its event */
#define LOOK_FIRST (planted == 6) /* finds ends: it looks before it commits */
#define NO_UPKEEP (planted == 7) /* finds ends: what a crash has left is not looked for */

#define READY 0
#define RUNNING 1
#define SCHEDULED 2
#define FINISHED 3

#define NO_WAIT 0
#define OPEN 1
#define BY_EVENT 2
#define BY_TIMEOUT 3

#define NOBODY 255

byte status = READY;
byte attempts = 0;
byte owner = NOBODY;
bool is_recorded = false;
/* Who has written the record, and has not committed. */
byte writes = NOBODY;
byte effects = 0;
byte wait = NO_WAIT;
bool is_there = false;
bool has_to_wake = false;
bool has_timeout = false;

#define IDLE 0
#define BEGINS 1
#define WRITTEN 2
#define RECORDED 3
#define LOOKED 4
#define SUSPENDED 5
#define DEAD 6
byte does[WORKERS];
byte mine[WORKERS];
byte faults = 0;

bool late_record = false;
bool two_effects = false;
bool two_ends = false;
bool wrong_wake = false;

#define has_claim(me) (status == RUNNING && owner == me && attempts == mine[me])
#define has_ended (wait == BY_EVENT || wait == BY_TIMEOUT)

inline end_wait(how) {
    must_not(two_ends, has_ended);
    wait = how
}

/* store/steps.py: WAKE_WAITING `step.finished_at IS NULL`, WAKE_WAITING `WHERE status = 'SCHEDULED'` */
inline wake_task() {
    if
    :: is_there && wait != NO_WAIT && (wait == OPEN || ENDS_AGAIN) ->
        end_wait(BY_EVENT);
        must_not(wrong_wake, status == RUNNING && WAKES_RUNNING);
        status = (status == SCHEDULED || WAKES_RUNNING -> READY : status)
    :: else
    fi
}

/* store/claim.py: CLAIM `task.status = 'READY'`; store/steps.py: RECORDS */
inline claim(me) {
    does[me] == IDLE && status == READY;
    status = RUNNING;
    owner = me;
    attempts++;
    mine[me] = attempts;
    does[me] = (is_recorded -> RECORDED : BEGINS)
}

/* store/steps.py: RECORD_OWN `task.attempts = %s AND task.status = 'RUNNING'` */
inline write_record(me) {
    does[me] == BEGINS && writes == NOBODY && !is_recorded && (has_claim(me) || NO_FENCE);
    must_not(late_record, !has_claim(me));
    writes = me;
    does[me] = WRITTEN
}

/* store/steps.py: _run_in_transaction `is_last=True`; the claim may be lost by now */
inline commit_record(me) {
    does[me] == WRITTEN;
    is_recorded = true;
    writes = NOBODY;
    effects++;
    must_not(two_effects, effects > 1);
    does[me] = RECORDED
}

/* store/steps.py: _run_in_transaction `self._find(name)` */
inline take_record(me) {
    does[me] == BEGINS && is_recorded;
    effects = effects + NO_REFUSAL;
    must_not(two_effects, effects > 1);
    does[me] = RECORDED
}

/* store/steps.py: _find `is no longer claimed by this attempt` */
inline lose_claim(me) {
    (does[me] == BEGINS || does[me] == RECORDED || does[me] == LOOKED) && !has_claim(me);
    does[me] = IDLE
}

/* store/steps.py: write_suspensions `after_commit(using, wake_waiting, using, events)` */
inline look_first(me) {
    LOOK_FIRST && does[me] == RECORDED && wait == NO_WAIT && has_claim(me) && !is_there;
    does[me] = LOOKED
}

/* store/steps.py: SUSPEND `WHERE step.finished_at IS NULL`, write_suspensions */
inline suspend(me) {
    ((does[me] == RECORDED && (!LOOK_FIRST || is_there)) || does[me] == LOOKED) && has_claim(me) && !has_ended &&
        !(wait == OPEN && has_timeout);
    status = SCHEDULED;
    wait = OPEN;
    does[me] = (NO_LOOK || does[me] == LOOKED -> IDLE : SUSPENDED)
}

/* store/steps.py: wake_waiting */
inline look(me) {
    does[me] == SUSPENDED;
    wake_task();
    does[me] = IDLE
}

/* store/release.py: promote; store/steps.py: SUSPEND `CASE WHEN is_over` */
inline time_out() {
    has_timeout && status == SCHEDULED && wait == OPEN;
    status = READY
}

/* store/steps.py: SUSPEND `WHERE is_over AND event.name = suspended.event` */
inline end_by_timeout(me) {
    does[me] == RECORDED && has_claim(me) && wait == OPEN && has_timeout;
    if
    :: is_there -> end_wait(BY_EVENT)
    :: else -> end_wait(BY_TIMEOUT)
    fi;
    status = READY;
    does[me] = IDLE
}

/* store/settle.py: SETTLE_SUCCESSES `AND task.status || '' = 'RUNNING'` */
inline finish(me) {
    does[me] == RECORDED && has_claim(me) && has_ended;
    status = FINISHED;
    does[me] = IDLE
}

/* environment: SIGKILL; its transaction is rolled back, and another worker lives */
inline die(me) {
    does[me] != DEAD && does[me] != IDLE && does[WORKERS - 1 - me] != DEAD && faults < FAULTS;
    faults++;
    writes = (writes == me -> NOBODY : writes);
    does[me] = DEAD
}

/* store/rescue.py: RESCUE `task.attempts = orphan.attempts` */
inline rescue(me) {
    status == RUNNING && owner == me && (does[me] == DEAD || faults < FAULTS);
    faults = faults + (does[me] != DEAD);
    status = READY;
    owner = NOBODY
}

/* store/steps.py: emit `after_commit(alias, wake_waiting, alias, [event])` */
inline emit_event() {
    !is_there;
    is_there = true;
    has_to_wake = true
}

inline wake_by_emitter() {
    has_to_wake;
    has_to_wake = false;
    wake_task()
}

/* environment: the emitter dies behind its commit */
inline lose_wake() {
    has_to_wake && faults < FAULTS;
    faults++;
    has_to_wake = false
}

/* worker/parent/upkeep.py: _missed_events; store/steps.py: MISSED_EVENTS `finished_at IS NULL` */
inline find_missed() {
    faults > 0 && !NO_UPKEEP && is_there && wait == OPEN && status == SCHEDULED;
    wake_task()
}

proctype Worker(byte me) {
    end_worker: do
    :: atomic { claim(me) }
    :: atomic { write_record(me) }
    :: atomic { commit_record(me) }
    :: atomic { take_record(me) }
    :: atomic { lose_claim(me) }
    :: atomic { suspend(me) }
    :: atomic { look(me) }
    :: atomic { end_by_timeout(me) }
    :: atomic { finish(me) }
    :: atomic { die(me) }
    :: atomic { look_first(me) }
    od
}

proctype Upkeep() {
    end_upkeep: do
    :: atomic { rescue(0) }
    :: atomic { rescue(1) }
    :: atomic { time_out() }
    :: atomic { find_missed() }
    od
}

proctype Emitter() {
    end_emitter: do
    :: atomic { emit_event() }
    :: atomic { wake_by_emitter() }
    :: atomic { lose_wake() }
    od
}

init {
    atomic {
        start();
        if :: true :: has_timeout = true fi;
        run Worker(0);
        run Worker(1);
        run Upkeep();
        run Emitter()
    }
}

ltl ends { <> (status == FINISHED) }
