// Goroutines over a heap that is larger than the budget, C memory through cgo, and children that
// are forked meanwhile.
package main

/*
#include <stdlib.h>
#include <string.h>
static unsigned long sum(const unsigned char *at, size_t size) {
	unsigned long total = 0;
	for (size_t i = 0; i < size; i++) total = total * 31 + at[i];
	return total;
}
*/
import "C"

import (
	"fmt"
	"os"
	"os/exec"
	"sort"
	"strconv"
	"strings"
	"sync"
	"unsafe"
)

type node struct {
	key   uint64
	text  string
	left  *node
	right *node
}

func mix(v uint64) uint64 {
	v += 0x9e3779b97f4a7c15
	v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9
	v = (v ^ (v >> 27)) * 0x94d049bb133111eb
	return v ^ (v >> 31)
}

func (n *node) add(key uint64) *node {
	if n == nil {
		return &node{key: key, text: strings.Repeat(strconv.FormatUint(key, 36), 6)}
	}
	if key < n.key {
		n.left = n.left.add(key)
	} else {
		n.right = n.right.add(key)
	}
	return n
}

func (n *node) walk(sum *uint64, count *int) {
	if n == nil {
		return
	}
	n.left.walk(sum, count)
	*sum = *sum*31 + n.key + uint64(len(n.text)) + uint64(n.text[3])
	*count++
	n.right.walk(sum, count)
}

func main() {
	nodes, _ := strconv.Atoi(os.Args[1])
	var wait sync.WaitGroup
	results := make([]string, 6)
	for worker := range results {
		wait.Add(1)
		go func() {
			defer wait.Done()
			var tree *node
			for i := 0; i < nodes; i++ {
				tree = tree.add(mix(uint64(worker)<<32 + uint64(i)))
			}
			size := C.size_t(8 << 20)
			block := (*C.uchar)(C.malloc(size))
			defer C.free(unsafe.Pointer(block))
			C.memset(unsafe.Pointer(block), C.int(worker+1), size)
			said, err := exec.Command("/bin/echo", "child", strconv.Itoa(worker)).Output()
			if err != nil {
				said = []byte(err.Error())
			}
			var sum uint64
			var count int
			for turn := 0; turn < 3; turn++ {
				tree.walk(&sum, &count)
			}
			results[worker] = fmt.Sprint(worker, sum, count, C.sum(block, size), string(said))
		}()
	}
	wait.Wait()
	sort.Strings(results)
	fmt.Print(strings.Join(results, ""))
}
