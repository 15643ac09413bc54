// Records in blocks: filled by goroutines, summed up in order, looked up at random.
package main

import (
	"fmt"
	"os"
	"strconv"
	"sync"
)

type record struct {
	key    uint64
	number uint32
	state  uint32
	value  float64
	name   [24]byte
}

const perBlock = 4096

func mix(value uint64) uint64 {
	value ^= value >> 31
	value *= 0x9e3779b97f4a7c15
	return value ^ value>>29
}

// Every block once, by so many goroutines.
func each(blocks [][]record, do func(at int) uint64) uint64 {
	const workers = 4
	var group sync.WaitGroup
	var sums [workers]uint64
	for worker := 0; worker < workers; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			for at := worker; at < len(blocks); at += workers {
				sums[worker] += do(at)
			}
		}(worker)
	}
	group.Wait()
	return sums[0] + sums[1] + sums[2] + sums[3]
}

func main() {
	count, _ := strconv.Atoi(os.Args[1])
	lookups, _ := strconv.Atoi(os.Args[2])
	blocks := make([][]record, count/perBlock)
	each(blocks, func(at int) uint64 {
		block := make([]record, perBlock)
		for n := range block {
			one := &block[n]
			one.number = uint32(at*perBlock + n)
			one.key = mix(uint64(one.number)) >> 24
			one.state = one.number % 5
			one.value = float64(one.number%1000) / 8
			copy(one.name[:], "record-"+strconv.Itoa(int(one.number)))
		}
		blocks[at] = block
		return 0
	})
	var total uint64
	for pass := 0; pass < 4; pass++ {
		total += each(blocks, func(at int) (sum uint64) {
			for n := range blocks[at] {
				one := &blocks[at][n]
				sum += one.key + uint64(one.value*8) + uint64(one.name[7])
			}
			return sum
		})
	}
	var seen uint64
	for n := 0; n < lookups; n++ {
		draw := mix(uint64(n)+total) % uint64(len(blocks)*perBlock)
		one := &blocks[draw/perBlock][draw%perBlock]
		one.state++
		seen += uint64(one.number)
	}
	fmt.Println(total, seen)
}
