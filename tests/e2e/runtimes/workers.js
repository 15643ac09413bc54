// Worker threads, each with a heap of its own, a buffer that all share, and children that are
// started meanwhile.
const { Worker, isMainThread, parentPort, workerData } = require("node:worker_threads");
const { spawnSync } = require("node:child_process");

if (isMainThread) {
  const entries = Number(process.argv[2]);
  const shared = new SharedArrayBuffer(24 << 20);
  const words = new Uint32Array(shared);
  for (let i = 0; i < words.length; i++) words[i] = Math.imul(i, 2654435761);
  const results = [];
  for (let worker = 0; worker < 4; worker++)
    new Worker(__filename, { workerData: { worker, entries, shared } })
      .on("message", (text) => {
        results.push(text);
        if (results.length === 4) console.log(results.sort().join("\n"));
      })
      .on("error", (error) => {
        console.log(String(error));
        process.exit(1);
      });
} else {
  const { worker, entries, shared } = workerData;
  const map = new Map();
  let sum = 0;
  for (let turn = 0; turn < 3; turn++) {
    for (let i = 0; i < entries; i++) {
      const key = `${worker}:${i}`;
      const old = map.get(key);
      if (turn > 0 && (old.turn !== turn - 1 || old.values[7] !== i * 7 + turn - 1))
        throw new Error(`wrong entry ${key}`);
      const values = Array.from({ length: 12 }, (_, k) => i * k + turn);
      map.set(key, { turn, values, text: key.repeat(3) });
      sum = (sum * 31 + key.length + map.get(key).text.charCodeAt(i % 5)) % 1000000007;
    }
    sum += spawnSync("/bin/echo", ["child", String(worker)]).stdout.length;
  }
  const words = new Uint32Array(shared);
  for (let i = 0; i < words.length; i++)
    if (words[i] !== Math.imul(i, 2654435761) >>> 0) throw new Error(`wrong word ${i}`);
  parentPort.postMessage(`${worker} ${sum} ${map.size}`);
}
