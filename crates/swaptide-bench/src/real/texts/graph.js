// A graph of objects: built, walked at random, changed, and summed up at the end.
const [count, steps] = process.argv.slice(2).map(Number);
let state = 7n;
function draw(below) {
    state = (state * 6364136223846793005n + 1442695040888963407n) & 0xffffffffffffffffn;
    return Number((state >> 33n) % BigInt(below));
}
const nodes = new Map();
for (let number = 0; number < count; number++) {
    nodes.set(`node-${number}`, { number, weight: draw(1000), seen: 0, links: [] });
}
const all = [...nodes.values()];
for (const node of all) {
    for (let link = 0; link < 4; link++) {
        const near = Math.min(count - 1, Math.max(0, node.number + draw(1000) - 500));
        node.links.push(all[link < 3 ? near : draw(count)]);
    }
}
let at = all[0];
let total = 0;
for (let step = 0; step < steps; step++) {
    total += at.weight;
    at.seen += 1;
    at = step % 97 === 0 ? nodes.get(`node-${draw(count)}`) : at.links[draw(4)];
}
console.log(total, all.reduce((sum, node) => sum + node.seen, 0), nodes.size);
