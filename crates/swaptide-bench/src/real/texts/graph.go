// A graph of objects: built, walked at random, changed, and summed up at the end.
package main

import (
	"fmt"
	"math/rand"
	"os"
	"strconv"
)

type node struct {
	number int
	name   string
	links  []*node
	weight int
	seen   int64
}

func main() {
	count, _ := strconv.Atoi(os.Args[1])
	steps, _ := strconv.Atoi(os.Args[2])
	draw := rand.New(rand.NewSource(7))
	nodes := map[string]*node{}
	all := make([]*node, 0, count)
	for number := 0; number < count; number++ {
		name := "node-" + strconv.Itoa(number)
		one := &node{number: number, name: name, weight: draw.Intn(1000) + 1000}
		nodes[name] = one
		all = append(all, one)
	}
	for _, one := range all {
		for link := 0; link < 4; link++ {
			near := one.number + draw.Intn(1000) - 500
			if link == 3 || near < 0 || near >= count {
				near = draw.Intn(count)
			}
			one.links = append(one.links, all[near])
		}
	}
	at, total := all[0], 0
	for step := 0; step < steps; step++ {
		total += at.weight
		at.seen++
		if step%97 == 0 {
			at = nodes["node-"+strconv.Itoa(draw.Intn(count))]
		} else {
			at = at.links[draw.Intn(4)]
		}
	}
	var seen int64
	for _, one := range all {
		seen += one.seen
	}
	fmt.Println(total, seen, len(nodes))
}
