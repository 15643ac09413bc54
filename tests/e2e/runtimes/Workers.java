import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.Executors;

/** Threads with a live heap and much garbage, and children that are started meanwhile: all that a
 * collector moves must come out right. */
public class Workers {
    static long mix(long v) {
        v += 0x9e3779b97f4a7c15L;
        v = (v ^ (v >>> 30)) * 0xbf58476d1ce4e5b9L;
        return v ^ (v >>> 27);
    }

    static String work(int worker, int entries) throws Exception {
        HashMap<Long, int[]> live = new HashMap<>();
        long sum = 0;
        for (int turn = 0; turn < 3; turn++) {
            for (int i = 0; i < entries; i++) {
                long key = mix(worker * 1000003L + i);
                int[] value = new int[16 + (int) (key & 31)];
                for (int k = 0; k < value.length; k++) value[k] = (int) (key >>> (k & 31)) + turn;
                live.put(key, value);
                StringBuilder garbage = new StringBuilder();
                for (int k = 0; k < 8; k++) garbage.append(key + k);
                sum += garbage.length();
            }
            Process child = new ProcessBuilder("/bin/echo", "child", "" + worker).start();
            sum += new String(child.getInputStream().readAllBytes()).hashCode() + child.waitFor();
            for (int i = 0; i < entries; i++) {
                long key = mix(worker * 1000003L + i);
                int[] value = live.get(key);
                for (int k = 0; k < value.length; k++) {
                    if (value[k] != (int) (key >>> (k & 31)) + turn)
                        throw new IllegalStateException("wrong word of entry " + i);
                    sum = sum * 31 + value[k];
                }
            }
        }
        return worker + " " + sum + " " + live.size();
    }

    public static void main(String[] words) throws Exception {
        int entries = Integer.parseInt(words[0]);
        List<Callable<String>> tasks = new ArrayList<>();
        for (int i = 0; i < 4; i++) {
            int worker = i;
            tasks.add(() -> work(worker, entries));
        }
        var threads = Executors.newFixedThreadPool(4);
        for (var result : threads.invokeAll(tasks)) System.out.println(result.get());
        threads.shutdown();
    }
}
