// A service with tables in memory: reads a file of rows, keeps them by key and by word, then
// answers requests on a socket.
const fs = require("fs");
const net = require("net");
const [path, address] = process.argv.slice(2);

const rows = new Map();
const words = new Map();
for (const line of fs.readFileSync(path, "utf8").split("\n")) {
  if (!line) continue;
  const [key, name, number, text] = line.split(",");
  const row = { name: name.slice(), number: Number(number), text: text.split(" ") };
  rows.set(Number(key), row);
  if (!words.has(row.text[0])) words.set(row.text[0], []);
  words.get(row.text[0]).push(Number(key));
}
const keys = [...rows.keys()].sort((a, b) => a - b);

function answer(seed) {
  let total = 0;
  for (let step = 0; step < 20000; step++) {
    seed = Number((BigInt(seed) * 1103515245n + 12345n) & 0x7fffffffn);
    const row = rows.get(keys[seed % keys.length]);
    total = (Math.imul(total, 31) + row.number + row.name.length + row.text.length) >>> 0;
    if (step % 100 === 0) total = (total + words.get(row.text[0]).length) >>> 0;
  }
  return total >>> 0;
}

net
  .createServer((client) => client.on("data", (data) => client.end(`${answer(Number(data))}\n`)))
  .listen(address);
