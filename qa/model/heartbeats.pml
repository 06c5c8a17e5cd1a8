/*
Which workers are dead: heartbeats, session locks, witnesses, and the rescue that relies on them.

Time passes in heartbeat intervals. An interval ends when every worker that runs and reaches the server has written its
heartbeat: this is what the model assumes of a living worker, and docs/worker.md says what it takes. A worker without a
task that rests writes one in every third interval. Worker 0 is the oldest.
*/

#include "common.pml"

#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef FAULTS
#define FAULTS 3
#endif
#define EACH each : 0 .. WORKERS - 1

#define NO_WITNESS (planted == 1) /* finds !living_condemned: silence proves a death while all are silent */
#define SEAMLESS (planted == 2) /* finds !living_condemned: heartbeats in a new session continue those of the last one */
#define NO_SESSION (planted == 3) /* finds !frozen_condemned: two missing heartbeats are enough although the session is there */
#define NO_LIMIT (planted == 4) /* finds claims_come_back: a session keeps a frozen worker alive forever */
#define NO_UPKEEP (planted == 5) /* finds claims_come_back: nobody looks for claims of dead workers */
#define DELETE_OWNERS (planted == 6) /* finds !living_condemned: rows of silent workers are deleted while there is no witness */
#define CLAIM_UNHEARD (planted == 7) /* finds !living_condemned: a worker that rests claims although its last heartbeat is old */
#define REST_ALONE (planted == 8) /* finds claims_come_back: workers rest although nobody else beats often */

/* Intervals: two heartbeats missed, the hard limit, a late heartbeat, a settled witness, a rest. */
#define MISSED 3
#define LIMIT 4
#define LATE 1
#define WITNESS_AFTER 2
#define REST_INTERVALS 3

#define RUNS 0
#define FROZEN 1
#define DEAD 2

byte process[WORKERS];
bool is_cut[WORKERS];
/* A session that holds the lock of the worker: its own, or that of its supervisor. */
bool session[WORKERS];
/* The row of the worker: whether it is there, heartbeat_at and beating_since as intervals since then. */
bool row[WORKERS];
byte age[WORKERS];
byte steady[WORKERS];
bool has_beaten[WORKERS];
/* Whether the worker has beaten at all: it claims nothing before. */
bool has_begun[WORKERS];
/* Whether the worker has a RUNNING task. */
bool owns[WORKERS];
/* Whether it rests, if it has none: the answer to its last heartbeat allowed it. */
bool rests[WORKERS];
bool is_up = true;
byte faults = 0;

/* Whole intervals for which the worker was frozen or cut off while the server was there. */
byte absent[WORKERS];

bool living_condemned = false;
bool frozen_condemned = false;

#define reaches(me) (process[me] == RUNS && is_up && !is_cut[me])

/* store/liveness.py: WITNESS `AND worker.beating_since <= clock_timestamp() -`, witness_values `WITNESS_AFTER * interval` */
#define is_witness(me) (row[me] && age[me] <= LATE && steady[me] >= WITNESS_AFTER)
#if WORKERS > 2
#define is_watched (is_witness(0) || is_witness(1) || is_witness(2) || NO_WITNESS)
#else
#define is_watched (is_witness(0) || is_witness(1) || NO_WITNESS)
#endif

/* store/rescue.py: RESCUE `WHERE NOT EXISTS (SELECT FROM witness)`, HELD_LOCKS */
#define is_alive(me) (row[me] && (!is_watched || age[me] < MISSED || (session[me] && !NO_SESSION && (age[me] < LIMIT || NO_LIMIT))))

/* store/liveness.py: _OLDER `AND older.beating_since < older.heartbeat_at`. One of them is enough in the model. */
#define is_often(other) (row[other] && age[other] <= LATE && steady[other] > age[other])
#define has_older_worker(me) ((me > 0 && is_often(0)) || (me > 1 && is_often(1)))

/* store/liveness.py: BEAT `OR NOT {is_recent("worker.heartbeat_at")}`, LOCK_WORKER;
   worker/liveness/heartbeat.py: _note_answer */
inline beat(me) {
    reaches(me) && !has_beaten[me];
    if
    :: !row[me] || ((!session[me] || age[me] > LATE) && !SEAMLESS) -> steady[me] = 0
    :: else
    fi;
    session[me] = true;
    row[me] = true;
    age[me] = 0;
    absent[me] = 0;
    has_beaten[me] = true;
    has_begun[me] = true;
    rests[me] = has_older_worker(me) || REST_ALONE
}

/* store/claim.py: claim_statement; worker/liveness/heartbeat.py: first_beat, check_heartbeat `if self.rest.is_on` */
inline claim(me) {
    reaches(me) && !owns[me] && has_begun[me] && (!rests[me] || age[me] <= LATE || CLAIM_UNHEARD);
    owns[me] = true
}

/* store/settle.py: settle */
inline settle(me) {
    reaches(me) && owns[me];
    owns[me] = false
}

/* store/rescue.py: RESCUE `AND NOT EXISTS (SELECT FROM alive WHERE alive.id = busy.worker)` */
inline rescue(me) {
    owns[me] && !is_alive(me) && !NO_UPKEEP && is_up;
    must_not(living_condemned, process[me] == RUNS && absent[me] == 0);
    must_not(frozen_condemned, process[me] != DEAD && session[me] && absent[me] < LIMIT - 1);
    owns[me] = false
}

/* store/liveness.py: DELETE_DEAD `AND EXISTS (SELECT FROM witness)` */
inline delete_dead(me) {
    is_up && row[me] && age[me] >= LIMIT && ((!owns[me] && is_watched) || DELETE_OWNERS);
    row[me] = false
}

/* worker/liveness/heartbeat_process_main.py: report_death */
inline report_death(me) {
    process[me] == DEAD && is_up && row[me];
    row[me] = false
}

/* worker/liveness/heartbeat.py: _must_beat_now `not self._is_idle()` */
#define may_rest(me) (rests[me] && !owns[me] && age[me] < REST_INTERVALS)
#define may_end(me) (!reaches(me) || has_beaten[me] || may_rest(me))

/* environment: an interval ends */
inline tick() {
#if WORKERS > 2
    may_end(0) && may_end(1) && may_end(2);
#else
    may_end(0) && may_end(1);
#endif
    byte each;
    for (EACH) {
        has_beaten[each] = false;
        age[each] = (age[each] < LIMIT -> age[each] + 1 : LIMIT);
        steady[each] = (steady[each] < WITNESS_AFTER -> steady[each] + 1 : WITNESS_AFTER);
        absent[each] = (is_up && (process[each] == FROZEN || is_cut[each]) && absent[each] < LIMIT -> absent[each] + 1 : absent[each])
    }
    each = 0
}

/* environment: SIGKILL. The server notices that the session is gone. */
inline die(me) {
    process[me] != DEAD && faults < FAULTS;
    faults++;
    process[me] = DEAD;
    session[me] = false
}

/* environment: SIGKILL, while the supervisor is stopped whose session holds the lock for its processes */
inline die_unnoticed(me) {
    process[me] != DEAD && session[me] && faults < FAULTS;
    faults++;
    process[me] = DEAD
}

/* environment: SIGSTOP, a suspended machine */
inline freeze(me) {
    process[me] == RUNS && faults < FAULTS;
    faults++;
    process[me] = FROZEN
}

/* environment: SIGCONT */
inline thaw(me) {
    process[me] == FROZEN;
    process[me] = RUNS
}

/* environment: the session of the heartbeat is lost. The next heartbeat has a new one. */
inline lose_session(me) {
    session[me] && faults < FAULTS;
    faults++;
    session[me] = false
}

/* environment: no session reaches the server, until the network is mended */
inline cut_off(me) {
    !is_cut[me] && faults < FAULTS;
    faults++;
    is_cut[me] = true;
    session[me] = false
}

/* environment: the network is mended */
inline mend(me) {
    is_cut[me];
    is_cut[me] = false
}

/* environment: the server crashes */
inline crash() {
    is_up && faults < FAULTS;
    faults++;
    is_up = false;
    byte each;
    for (EACH) { session[each] = false }
    each = 0
}

/* environment: the server is back */
inline restart() {
    !is_up;
    is_up = true
}

proctype Heartbeat(byte me) {
    end_heartbeat: do
    :: atomic { beat(me) }
    od
}

proctype Worker(byte me) {
    end_worker: do
    :: atomic { claim(me) }
    :: atomic { settle(me) }
    od
}

proctype Upkeep(byte me) {
    end_upkeep: do
    :: atomic { rescue(me) }
    :: atomic { delete_dead(me) }
    od
}

/* The last worker is spared, so that somebody is there to rescue. */
proctype Faults(byte me) {
    end_faults: do
    :: atomic { me < WORKERS - 1 -> die(me) }
    :: atomic { me < WORKERS - 1 -> die_unnoticed(me) }
    :: atomic { me < WORKERS - 1 -> freeze(me) }
    :: atomic { thaw(me) }
    :: atomic { lose_session(me) }
    :: atomic { me < WORKERS - 1 -> cut_off(me) }
    :: atomic { mend(me) }
    :: atomic { report_death(me) }
    od
}

proctype Time() {
    end_time: do
    :: atomic { tick() }
    od
}

proctype Server() {
    end_server: do
    :: atomic { crash() }
    :: atomic { restart() }
    od
}

init {
    atomic {
        start();
        byte each;
        for (EACH) {
            run Heartbeat(each); run Worker(each); run Upkeep(each); run Faults(each)
        }
        each = 0;
        run Time();
        run Server()
    }
}

ltl claims_come_back { [] ((process[0] != RUNS && owns[0]) -> <> (process[0] == RUNS || !owns[0])) }
