import java.util.Scanner;

/** Holds megabytes of numbers that follow from a seed; verifies them when it is told to end. */
public class Holds {
    static long word(long x) {
        x += 0x9e3779b97f4a7c15L;
        x = (x ^ (x >>> 30)) * 0xbf58476d1ce4e5b9L;
        return x ^ (x >>> 31);
    }

    public static void main(String[] words) {
        int megabytes = Integer.parseInt(words[0]);
        long seed = Long.parseLong(words[1]);
        int count = megabytes * 8;
        long[][] blocks = new long[count][1 << 14];
        for (int m = 0; m < count; m++) {
            for (int i = 0; i < 1 << 14; i += 2) {
                blocks[m][i] = word(seed + ((long) m << 14) + i);
            }
        }
        System.out.println("ready " + ProcessHandle.current().pid());
        new Scanner(System.in).nextLine();
        for (int m = 0; m < count; m++) {
            for (int i = 0; i < 1 << 14; i++) {
                long wanted = i % 2 == 0 ? word(seed + ((long) m << 14) + i) : 0;
                if (blocks[m][i] != wanted) {
                    System.out.println("block " + m + " differs");
                    System.exit(3);
                }
            }
        }
        System.out.println("OK");
    }
}
