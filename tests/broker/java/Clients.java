import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.serialization.*;

/** The Java producer, consumer and admin against one broker. What it prints must be the same everywhere. */
public class Clients {
    static String bootstrap;
    static String run;

    static void say(Object... words) {
        StringBuilder line = new StringBuilder();
        for (Object word : words) line.append(word).append(' ');
        System.out.println(line.toString().trim().replace(run, "RUN"));
    }

    static String name(Throwable error) {
        while (error instanceof ExecutionException || error.getClass() == KafkaException.class && error.getCause() != null)
            error = error.getCause();
        return error.getClass().getSimpleName();
    }

    static KafkaProducer<String, String> producer(String id, String... more) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        if (id != null) p.put("transactional.id", id);
        p.put("linger.ms", "5");
        for (int i = 0; i < more.length; i += 2) p.put(more[i], more[i + 1]);
        return new KafkaProducer<>(p, new StringSerializer(), new StringSerializer());
    }

    static KafkaConsumer<String, String> consumer(String group, String... more) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("group.id", group);
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        p.put("isolation.level", "read_committed");
        p.put("session.timeout.ms", "6000");
        p.put("heartbeat.interval.ms", "500");
        for (int i = 0; i < more.length; i += 2) p.put(more[i], more[i + 1]);
        return new KafkaConsumer<>(p, new StringDeserializer(), new StringDeserializer());
    }

    static List<String> drain(KafkaConsumer<String, String> consumer, int wanted) {
        List<String> found = new ArrayList<>();
        long until = System.currentTimeMillis() + 15_000;
        while (System.currentTimeMillis() < until) {
            for (ConsumerRecord<String, String> r : consumer.poll(Duration.ofMillis(200))) found.add(r.value());
            if (found.size() >= wanted) break;
        }
        Collections.sort(found);
        return found;
    }

    static void admin(Admin admin, String topic) throws Exception {
        // Kept for ever: the records below are of 1970, and a retention check may come at any time.
        admin.createTopics(List.of(new NewTopic(topic, 2, (short) 1).configs(Map.of("retention.ms", "-1")))).all().get();
        try {
            admin.createTopics(List.of(new NewTopic(topic, 2, (short) 1))).all().get();
        } catch (Exception error) {
            say("created again", name(error));
        }
        TopicDescription found = null;
        for (int i = 0; found == null && i < 50; i++) {
            try {
                found = admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic);
            } catch (ExecutionException notYet) {
                Thread.sleep(100);
            }
        }
        say("described", found.name(), found.partitions().size(), found.isInternal());
        admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(3))).all().get();
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        admin.incrementalAlterConfigs(Map.of(resource, List.of(new AlterConfigOp(new ConfigEntry("segment.bytes", "2000000"), AlterConfigOp.OpType.SET)))).all().get();
        Thread.sleep(300);
        Config config = admin.describeConfigs(List.of(resource)).all().get().get(resource);
        say("configs", config.get("retention.ms").value(), config.get("segment.bytes").value(), config.get("segment.bytes").source());
        say("nodes", admin.describeCluster().nodes().get().size());
        say("features", admin.describeFeatures().featureMetadata().get().finalizedFeatures().get("transaction.version").maxVersionLevel());
        try {
            admin.describeTopics(List.of("nowhere-" + run)).allTopicNames().get();
        } catch (Exception error) {
            say("described nowhere", name(error));
        }
    }

    static void plain(String topic) throws Exception {
        for (String compression : List.of("none", "gzip", "snappy", "lz4", "zstd"))
            try (KafkaProducer<String, String> p = producer(null, "compression.type", compression)) {
                RecordMetadata last = null;
                for (int i = 0; i < 50; i++)
                    last = p.send(new ProducerRecord<>(topic, 0, 1000L + i, "k", compression + i, List.of(new org.apache.kafka.common.header.internals.RecordHeader("h", new byte[] {1})))).get();
                say("plain", compression, last.partition(), last.offset());
            }
    }

    static void transactions(String topic) throws Exception {
        KafkaProducer<String, String> first = producer("tx-" + run);
        first.initTransactions();
        for (int n = 0; n < 4; n++) {
            first.beginTransaction();
            for (int i = 0; i < 5; i++) first.send(new ProducerRecord<>(topic, 1, "k", "t" + n + "-" + i));
            first.flush();
            if (n % 2 == 0) first.commitTransaction();
            else first.abortTransaction();
        }
        first.beginTransaction();
        first.send(new ProducerRecord<>(topic, 1, "k", "zombie")).get();
        KafkaProducer<String, String> second = producer("tx-" + run);
        second.initTransactions();
        try {
            first.send(new ProducerRecord<>(topic, 1, "k", "late")).get();
            first.commitTransaction();
            say("the zombie committed");
        } catch (Exception error) {
            say("the zombie", name(error));
        }
        first.close(Duration.ofSeconds(2));
        second.beginTransaction();
        second.send(new ProducerRecord<>(topic, 1, "k", "kept"));
        second.commitTransaction();
        second.close();
        try (KafkaConsumer<String, String> c = consumer("reader-" + run)) {
            c.assign(List.of(new TopicPartition(topic, 1)));
            say("committed", drain(c, 11));
            say("end", c.endOffsets(List.of(new TopicPartition(topic, 1))).values().size());
        }
        try (KafkaConsumer<String, String> c = consumer("reader2-" + run, "isolation.level", "read_uncommitted")) {
            c.assign(List.of(new TopicPartition(topic, 1)));
            say("all", drain(c, 22).size());
            Map<TopicPartition, OffsetAndTimestamp> times = c.offsetsForTimes(Map.of(new TopicPartition(topic, 0), 1010L));
            say("since", times.values().iterator().next());
        }
    }

    static void consumeTransformProduce(Admin admin, String topic) throws Exception {
        String group = "ctp-" + run;
        try (KafkaProducer<String, String> p = producer("ctp-" + run); KafkaConsumer<String, String> c = consumer(group)) {
            p.initTransactions();
            c.subscribe(List.of(topic));
            int seen = 0;
            for (int round = 0; round < 100 && seen < 261; round++) {
                ConsumerRecords<String, String> records = c.poll(Duration.ofMillis(200));
                if (records.isEmpty()) continue;
                p.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
                for (ConsumerRecord<String, String> r : records) {
                    p.send(new ProducerRecord<>(topic, 2, "k", r.value()));
                    offsets.put(new TopicPartition(r.topic(), r.partition()), new OffsetAndMetadata(r.offset() + 1));
                }
                seen += records.count();
                p.sendOffsetsToTransaction(offsets, c.groupMetadata());
                p.commitTransaction();
                if (seen >= 261) break;
            }
            say("transformed at least 261:", seen >= 261);
        }
        Map<TopicPartition, OffsetAndMetadata> found = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get();
        say("group offset of 0", found.get(new TopicPartition(topic, 0)).offset());
    }

    static void groups(Admin admin, String topic) throws Exception {
        String group = "group-" + run;
        KafkaConsumer<String, String> one = consumer(group);
        KafkaConsumer<String, String> two = consumer(group);
        one.subscribe(List.of(topic));
        two.subscribe(List.of(topic));
        long until = System.currentTimeMillis() + 20_000;
        while (System.currentTimeMillis() < until && (one.assignment().isEmpty() || two.assignment().isEmpty() || one.assignment().size() + two.assignment().size() != 3)) {
            one.poll(Duration.ofMillis(100));
            two.poll(Duration.ofMillis(100));
        }
        say("shared", one.assignment().size() + two.assignment().size());
        ConsumerGroupDescription found = admin.describeConsumerGroups(List.of(group)).all().get().get(group);
        say("group", found.members().size(), found.partitionAssignor());
        two.close();
        while (System.currentTimeMillis() < until && one.assignment().size() != 3) one.poll(Duration.ofMillis(100));
        say("alone", one.assignment().size());
        one.commitSync(Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(7, "note")));
        try {
            admin.deleteConsumerGroups(List.of(group)).all().get();
        } catch (Exception error) {
            say("deleted with members", name(error));
        }
        one.close();
        say("offset", admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().get(new TopicPartition(topic, 0)));
        admin.deleteConsumerGroups(List.of(group)).all().get();
        long left = admin.listConsumerGroups().all().get().stream().filter(g -> g.groupId().equals(group)).count();
        say("groups left", left);
    }

    static void looking(Admin admin, String topic) throws Exception {
        String id = "open-" + run;
        KafkaProducer<String, String> p = producer(id);
        p.initTransactions();
        p.beginTransaction();
        p.send(new ProducerRecord<>(topic, 2, "k", "open")).get();
        TopicPartition place = new TopicPartition(topic, 2);
        TransactionDescription found = admin.describeTransactions(List.of(id)).all().get().get(id);
        say("open", found.state(), found.topicPartitions().equals(Set.of(place)));
        long listed = admin.listTransactions(new ListTransactionsOptions().filterStates(List.of(TransactionState.ONGOING))).all().get().stream().filter(t -> t.transactionalId().equals(id)).count();
        say("listed", listed);
        long open = admin.describeProducers(List.of(place)).all().get().get(place).activeProducers().stream().filter(s -> s.currentTransactionStartOffset().isPresent()).count();
        say("producers with something open", open);
        admin.fenceProducers(List.of(id)).all().get();
        try {
            p.commitTransaction();
            say("committed though fenced");
        } catch (Exception error) {
            say("fenced by the admin", name(error));
        }
        p.close(Duration.ofSeconds(2));
        say("deleted records", admin.deleteRecords(Map.of(new TopicPartition(topic, 0), RecordsToDelete.beforeOffset(10))).lowWatermarks().get(new TopicPartition(topic, 0)).get().lowWatermark());
        say("earliest", admin.listOffsets(Map.of(new TopicPartition(topic, 0), OffsetSpec.earliest())).all().get().values().iterator().next().offset());
        admin.deleteTopics(List.of(topic)).all().get();
    }

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        run = arguments[1];
        String topic = "java-" + run;
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        try (Admin admin = Admin.create(p)) {
            admin(admin, topic);
            plain(topic);
            transactions(topic);
            consumeTransformProduce(admin, topic);
            groups(admin, topic);
            looking(admin, topic);
        }
        say("done");
    }
}
