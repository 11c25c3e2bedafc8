import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.serialization.*;

/** A consumer group copies a topic within transactions, offsets included, until its input ends. */
public class Copy {
    static Properties settings(String bootstrap) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("request.timeout.ms", "5000");
        return p;
    }

    static KafkaConsumer<byte[], byte[]> consumer(String bootstrap, String protocol) {
        Properties p = settings(bootstrap);
        p.put("group.id", "java-copy-" + protocol);
        p.put("group.protocol", protocol);
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        p.put("isolation.level", "read_committed");
        p.put("max.poll.records", "10");
        if (protocol.equals("classic")) p.put("session.timeout.ms", "6000");
        return new KafkaConsumer<>(p, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static KafkaProducer<byte[], byte[]> producer(String bootstrap, String protocol) {
        Properties p = settings(bootstrap);
        p.put("transactional.id", "java-copy-" + protocol);
        p.put("delivery.timeout.ms", "20000");
        p.put("max.block.ms", "30000");
        KafkaProducer<byte[], byte[]> made = new KafkaProducer<>(p, new ByteArraySerializer(), new ByteArraySerializer());
        made.initTransactions();
        return made;
    }

    static void copy(KafkaConsumer<byte[], byte[]> from, KafkaProducer<byte[], byte[]> to, String target) {
        ConsumerRecords<byte[], byte[]> found = from.poll(Duration.ofMillis(200));
        if (found.isEmpty()) return;
        to.beginTransaction();
        Map<TopicPartition, OffsetAndMetadata> places = new HashMap<>();
        for (ConsumerRecord<byte[], byte[]> one : found) {
            to.send(new ProducerRecord<>(target, one.partition(), null, one.value()));
            places.put(new TopicPartition(one.topic(), one.partition()), new OffsetAndMetadata(one.offset() + 1));
        }
        to.sendOffsetsToTransaction(places, from.groupMetadata());
        to.commitTransaction();
        System.out.println("committed " + found.count());
    }

    public static void main(String[] args) throws Exception {
        String protocol = args[0], bootstrap = args[1], source = args[2], target = args[3];
        while (System.in.available() == 0) {
            KafkaConsumer<byte[], byte[]> from = consumer(bootstrap, protocol);
            KafkaProducer<byte[], byte[]> to = null;
            try {
                to = producer(bootstrap, protocol);
                from.subscribe(List.of(source));
                while (System.in.available() == 0) copy(from, to, target);
            } catch (KafkaException error) {
                // A new producer of this name ends what is open, and the group goes on from its offsets.
                System.out.println("again " + error);
            } finally {
                if (to != null) to.close(Duration.ZERO);
                from.close(CloseOptions.timeout(Duration.ofSeconds(5)));
            }
        }
        System.out.println("done");
    }
}
