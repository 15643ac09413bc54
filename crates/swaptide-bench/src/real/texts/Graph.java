import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** A graph of objects: built, walked at random, changed, and summed up at the end. */
public class Graph {
    static final class Node {
        final int number;
        final String name;
        final List<Node> links = new ArrayList<>(4);
        Integer weight;
        long seen;

        Node(int number, int weight) {
            this.number = number;
            this.name = "node-" + number;
            this.weight = weight + 1000;
        }
    }

    public static void main(String[] words) {
        int count = Integer.parseInt(words[0]);
        int steps = Integer.parseInt(words[1]);
        Random draw = new Random(7);
        Map<String, Node> nodes = new HashMap<>();
        List<Node> all = new ArrayList<>(count);
        for (int number = 0; number < count; number++) {
            Node node = new Node(number, draw.nextInt(1000));
            nodes.put(node.name, node);
            all.add(node);
        }
        for (Node node : all) {
            for (int link = 0; link < 4; link++) {
                int near = Math.min(count - 1, Math.max(0, node.number + draw.nextInt(1000) - 500));
                node.links.add(all.get(link < 3 ? near : draw.nextInt(count)));
            }
        }
        Node at = all.get(0);
        long total = 0;
        for (int step = 0; step < steps; step++) {
            total += at.weight;
            at.seen += 1;
            boolean jumps = step % 97 == 0;
            at = jumps ? nodes.get("node-" + draw.nextInt(count)) : at.links.get(draw.nextInt(4));
        }
        long seen = 0;
        for (Node node : all) {
            seen += node.seen;
        }
        System.out.println(total + " " + seen + " " + nodes.size());
    }
}
