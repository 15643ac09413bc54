import java.io.BufferedReader;
import java.io.FileReader;
import java.net.StandardProtocolFamily;
import java.net.UnixDomainSocketAddress;
import java.nio.ByteBuffer;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** A service with tables in memory: reads a file of rows, keeps them by key and by word, then
 * answers requests on a socket. */
public class Service {
    record Row(String name, int number, String[] text) {}

    static final Map<Integer, Row> rows = new HashMap<>();
    static final Map<String, List<Integer>> words = new HashMap<>();
    static int[] keys;

    static long answer(long seed) {
        int total = 0;
        for (int step = 0; step < 20000; step++) {
            seed = (seed * 1103515245L + 12345L) & 0x7fffffffL;
            Row row = rows.get(keys[(int) (seed % keys.length)]);
            total = total * 31 + row.number + row.name.length() + row.text.length;
            if (step % 100 == 0) total += words.get(row.text[0]).size();
        }
        return total & 0xffffffffL;
    }

    public static void main(String[] args) throws Exception {
        try (BufferedReader file = new BufferedReader(new FileReader(args[0]))) {
            for (String line = file.readLine(); line != null; line = file.readLine()) {
                String[] parts = line.split(",", 4);
                Row row = new Row(parts[1], Integer.parseInt(parts[2]), parts[3].split(" "));
                rows.put(Integer.parseInt(parts[0]), row);
                words.computeIfAbsent(row.text[0], word -> new ArrayList<>())
                    .add(Integer.parseInt(parts[0]));
            }
        }
        keys = rows.keySet().stream().mapToInt(Integer::intValue).sorted().toArray();
        ServerSocketChannel server = ServerSocketChannel.open(StandardProtocolFamily.UNIX);
        server.bind(UnixDomainSocketAddress.of(args[1]));
        while (true) {
            try (SocketChannel client = server.accept()) {
                ByteBuffer buffer = ByteBuffer.allocate(100);
                client.read(buffer);
                long seed = Long.parseLong(new String(buffer.array(), 0, buffer.position()).trim());
                client.write(ByteBuffer.wrap((answer(seed) + "\n").getBytes()));
            }
        }
    }
}
