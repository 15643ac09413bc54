// A large graph of objects, strings, maps and typed arrays, changed and walked; prints checksums.
//     graph.js NODES SEED
'use strict';

const nodes = Number(process.argv[2]);
let state = Number(process.argv[3]) >>> 0 || 1;

function next(limit) {
  state ^= state << 13;
  state >>>= 0;
  state ^= state >>> 17;
  state ^= state << 5;
  state >>>= 0;
  return state % limit;
}

const all = new Array(nodes);
for (let i = 0; i < nodes; i++) {
  const name = `node-${i}-${next(1e6)}`;
  all[i] = { id: i, name, links: [], data: { weight: next(1000), seen: 0 } };
}
for (const node of all) for (let k = 0; k < 4; k++) node.links.push(all[next(nodes)]);
const byName = new Map(all.map((node) => [node.name, node]));
const raw = new Uint32Array(nodes * 8);
for (let i = 0; i < raw.length; i++) raw[i] = Math.imul(i, 2654435761) ^ state;

let sum = 0;
for (let round = 0; round < 3; round++) {
  let at = all[0];
  for (let step = 0; step < nodes; step++) {
    at.data.seen++;
    sum = (sum * 31 + at.data.weight + at.links.length) % 9007199254740;
    at = at.links[(step + round) % at.links.length];
  }
  for (let i = round; i < nodes; i += 3) all[i] = { ...all[i], copy: `${all[i].name}/${round}` };
}
console.log('walk', sum);
let found = 0;
for (let i = 0; i < nodes; i += 5) {
  const node = byName.get(all[i].name);
  if (node === undefined || node.id !== i) {
    console.log('wrong node', i, node && node.id);
    process.exit(3);
  }
  found += node.data.seen;
}
let folded = 0;
for (let i = 0; i < raw.length; i++) folded = (Math.imul(folded, 33) ^ raw[i]) >>> 0;
console.log('map', byName.size, found);
console.log('raw', folded);
