// The verbs of base.py for graphile-worker.
const fs = require("fs");
const { Pool } = require("pg");
const { Logger, makeWorkerUtils, run } = require("graphile-worker");

const WARM_UP = 5;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const now = () => Date.now() / 1000;
const logger = new Logger(() => () => {});

const taskList = {
  nothing: () => {},
  sleep: ({ seconds }) => sleep(1000 * seconds),
  stamp: ({ sent }) => fs.appendFileSync(process.env.BENCH_STAMPS, `${now() - sent}\n`),
};

async function timed(call) {
  const began = performance.now();
  await call();
  console.log((performance.now() - began) / 1000);
}

async function repeat(times, call) {
  for (let i = 0; i < times; i++) await call();
}

async function work(atOnce = 24) {
  const pgPool = new Pool({ max: 25 });
  const worker = {
    concurrentJobs: atOnce,
    maxPoolSize: 25,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    pgPool,
    logger,
  };
  const runner = await run({ preset: { worker }, pgPool, taskList });
  await runner.promise;
}

// A named queue runs one job at a time; of a job key, one job waits.
const keyedJobs = {
  locked: (key) => ({ identifier: "nothing", payload: {}, queueName: `key ${key}` }),
  locked_sleep: (key, seconds) => ({ identifier: "sleep", payload: { seconds }, queueName: `key ${key}` }),
  unique: (key) => ({ identifier: "nothing", payload: {}, jobKey: `key ${key}` }),
};

async function produce(verb, count, what = "nothing", number = undefined, seconds = undefined) {
  const pgPool = new Pool();
  const utils = await makeWorkerUtils({ pgPool, logger });
  const one = () => utils.addJob("nothing", {});
  const stamp = async () => {
    await sleep(20 + 180 * Math.random());
    await utils.addJob("stamp", { sent: now() });
  };
  const verbs = {
    setup: () => utils.migrate(),
    many: () =>
      timed(() => utils.addJobs(Array.from({ length: count }, () => ({ identifier: what, payload: { seconds: number } })))),
    keyed: () => timed(() => utils.addJobs(Array.from({ length: count }, (_, n) => keyedJobs[what](n % number, seconds)))),
    singles: async () => {
      await repeat(WARM_UP, one);
      await timed(() => repeat(count, one));
    },
    stamps: () => repeat(WARM_UP + count, stamp),
  };
  await verbs[verb]();
  await utils.release();
  await pgPool.end();
}

const [verb, count, what, last, seconds] = process.argv.slice(2);
const number = (text) => (text === undefined ? undefined : Number(text));
(verb === "worker" ? work(number(count)) : produce(verb, number(count), what, number(last), number(seconds))).catch((error) => {
  console.error(error.message);
  process.exit(1);
});
