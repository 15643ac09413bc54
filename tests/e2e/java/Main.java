import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** A large heap of maps, lists and arrays that two threads build, change and walk; prints
 * checksums. Main ENTRIES SEED */
public class Main {
    record Item(int id, String name, byte[] data) {}

    static long work(int entries, long seed) {
        Random random = new Random(seed);
        Map<String, Item> byName = new HashMap<>();
        List<Item> inOrder = new ArrayList<>();
        for (int i = 0; i < entries; i++) {
            byte[] data = new byte[64 + random.nextInt(400)];
            for (int at = 0; at < data.length; at += 3) data[at] = (byte) (i * 31 + at);
            Item item = new Item(i, "item-" + i + "-" + random.nextInt(1000000), data);
            byName.put(item.name, item);
            inOrder.add(item);
        }
        long sum = 0;
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < entries; i++) {
                Item item = byName.get(inOrder.get(i).name);
                if (item.id != i || item.data[0] != (byte) (i * 31)) {
                    System.out.println("wrong item " + i + ": " + item);
                    System.exit(3);
                }
                sum = sum * 31 + item.data.length + item.name.hashCode();
            }
            for (int i = round; i < entries; i += 4) {
                Item old = inOrder.get(i);
                Item fresh = new Item(i, old.name, old.data.clone());
                inOrder.set(i, fresh);
                byName.put(fresh.name, fresh);
            }
        }
        return sum;
    }

    public static void main(String[] words) throws InterruptedException {
        int entries = Integer.parseInt(words[0]);
        long seed = Long.parseLong(words[1]);
        long[] sums = new long[2];
        Thread[] threads = new Thread[2];
        for (int i = 0; i < 2; i++) {
            int self = i;
            threads[i] = new Thread(() -> sums[self] = work(entries / 2, seed + self));
            threads[i].start();
        }
        for (Thread thread : threads) thread.join();
        System.out.println("sums " + sums[0] + " " + sums[1]);
    }
}
