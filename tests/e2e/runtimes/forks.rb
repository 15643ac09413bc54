# Threads over a large heap, and children forked by them that read and change all of it.
ENTRIES = Integer(ARGV[0])

def value(worker, i, turn)
  [worker, i, turn, (i * 7919 + turn).to_s * 3, (i * 2654435761 + turn) & 0xffffffff]
end

def child(data, worker, turn)
  right = (0...ENTRIES).all? { |i| data[i] == value(worker, i, turn) }
  0.step(ENTRIES - 1, 3) { |i| data[i] = value(worker, i, 99) }
  GC.start
  right &&= (0...ENTRIES).all? { |i| data[i] == value(worker, i, i % 3 == 0 ? 99 : turn) }
  exit!(right ? 5 : 6)
end

results = Queue.new
threads = 3.times.map do |worker|
  Thread.new do
    data = {}
    2.times do |turn|
      ENTRIES.times { |i| data[i] = value(worker, i, turn) }
      pid = fork { child(data, worker, turn) }
      _, status = Process.wait2(pid)
      right = (0...ENTRIES).all? { |i| data[i] == value(worker, i, turn) }
      results << [worker, turn, status.exitstatus, right]
    end
  end
end
threads.each(&:join)
puts Array.new(results.size) { results.pop }.sort.inspect
