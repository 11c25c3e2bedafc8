import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.serialization.*;

/** Consumers with group.protocol=consumer against one broker. What it prints must be the same everywhere. */
public class NewerConsumers {
    static String bootstrap;
    static String run;
    static List<KafkaConsumer<String, String>> alive = new ArrayList<>();

    static void say(Object... words) {
        StringBuilder line = new StringBuilder();
        for (Object word : words) line.append(word).append(' ');
        System.out.println(line.toString().trim().replace(run, "RUN"));
    }

    static KafkaConsumer<String, String> consumer(String group, String protocol, String... more) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("group.id", group);
        p.put("group.protocol", protocol);
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        if (protocol.equals("classic")) {
            p.put("heartbeat.interval.ms", "300");
            p.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer.CooperativeStickyAssignor");
        }
        for (int i = 0; i < more.length; i += 2) p.put(more[i], more[i + 1]);
        KafkaConsumer<String, String> made = new KafkaConsumer<>(p, new StringDeserializer(), new StringDeserializer());
        alive.add(made);
        return made;
    }

    static void close(KafkaConsumer<String, String> one) {
        one.close();
        alive.remove(one);
    }

    /** Let all consumers poll until their numbers of partitions are these, in their order of size. */
    static void settle(String about, Integer... sizes) {
        long until = System.currentTimeMillis() + 60_000;
        List<Integer> now = List.of();
        while (System.currentTimeMillis() < until) {
            for (KafkaConsumer<String, String> one : alive) one.poll(Duration.ofMillis(20));
            now = alive.stream().map(one -> one.assignment().size()).sorted().toList();
            if (now.equals(List.of(sizes))) break;
        }
        Set<TopicPartition> all = new HashSet<>();
        for (KafkaConsumer<String, String> one : alive) all.addAll(one.assignment());
        say(about, now, "together", all.size());
    }

    /** What the group is once all have confirmed what they were given. */
    static void describe(Admin admin, String group) throws Exception {
        long until = System.currentTimeMillis() + 60_000;
        ConsumerGroupDescription found;
        do {
            for (KafkaConsumer<String, String> one : alive) one.poll(Duration.ofMillis(20));
            found = admin.describeConsumerGroups(List.of(group)).all().get().get(group);
        } while (found.groupState() != GroupState.STABLE && System.currentTimeMillis() < until);
        List<String> kinds = found.members().stream().map(m -> m.upgraded().map(String::valueOf).orElse("classic")).sorted().toList();
        say("described", found.type(), found.groupState(), found.partitionAssignor(), kinds);
    }

    static void topic(Admin admin, String name, int partitions) throws Exception {
        admin.createTopics(List.of(new NewTopic(name, partitions, (short) 1))).all().get();
        for (int i = 0; i < 100; i++) {
            try {
                admin.describeTopics(List.of(name)).allTopicNames().get();
                return;
            } catch (ExecutionException notYet) {
                Thread.sleep(50);
            }
        }
    }

    static void readAndCommit(Admin admin, String topic) throws Exception {
        String group = "read-" + run;
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        try (KafkaProducer<String, String> out = new KafkaProducer<>(p, new StringSerializer(), new StringSerializer())) {
            for (int i = 0; i < 100; i++) out.send(new ProducerRecord<>(topic, i % 4, "k", "v" + i));
        }
        KafkaConsumer<String, String> one = consumer(group, "consumer");
        one.subscribe(List.of(topic));
        Set<String> seen = new TreeSet<>();
        long until = System.currentTimeMillis() + 60_000;
        while (seen.size() < 100 && System.currentTimeMillis() < until)
            for (ConsumerRecord<String, String> r : one.poll(Duration.ofMillis(100))) seen.add(r.value());
        one.commitSync();
        say("read", seen.size());
        describe(admin, group);
        close(one);
        Map<TopicPartition, OffsetAndMetadata> kept = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get();
        say("kept", new TreeSet<>(kept.values().stream().map(OffsetAndMetadata::offset).toList()), kept.size());
        say("listed", admin.listGroups(ListGroupsOptions.forConsumerGroups()).all().get().stream()
            .filter(g -> g.groupId().equals(group)).map(g -> g.type() + " " + g.groupState().get()).toList());
        KafkaConsumer<String, String> again = consumer(group, "consumer", "group.remote.assignor", "range");
        again.subscribe(List.of(topic));
        settle("again", 4);
        say("nothing new", again.poll(Duration.ofMillis(500)).isEmpty());
        describe(admin, group);
        try {
            admin.deleteConsumerGroups(List.of(group)).all().get();
        } catch (ExecutionException error) {
            say("deleted with members", error.getCause().getClass().getSimpleName());
        }
        close(again);
        admin.deleteConsumerGroups(List.of(group)).all().get();
    }

    static void comeAndGo(Admin admin, String topic) throws Exception {
        String group = "group-" + run;
        for (int i = 0; i < 3; i++) consumer(group, "consumer").subscribe(List.of(topic));
        settle("three", 1, 1, 2);
        close(alive.get(0));
        settle("two", 2, 2);
        KafkaConsumer<String, String> fixed = consumer(group, "consumer", "group.instance.id", "static");
        fixed.subscribe(List.of(topic));
        settle("and a static one", 1, 1, 2);
        Set<TopicPartition> before = new HashSet<>(fixed.assignment());
        close(fixed);
        fixed = consumer(group, "consumer", "group.instance.id", "static");
        fixed.subscribe(List.of(topic));
        settle("it is back", 1, 1, 2);
        say("with the same partitions", fixed.assignment().equals(before));
        admin.removeMembersFromConsumerGroup(group, new RemoveMembersFromConsumerGroupOptions(
            List.of(new MemberToRemove("static")))).all().get();
        close(fixed);
        settle("removed", 2, 2);
        while (!alive.isEmpty()) close(alive.get(0));
    }

    static void patterns(Admin admin, String topic) throws Exception {
        KafkaConsumer<String, String> one = consumer("pattern-" + run, "consumer");
        one.subscribe(new SubscriptionPattern(topic + "-x.*"));
        one.poll(Duration.ofMillis(200));
        topic(admin, topic + "-x1", 2);
        topic(admin, topic + "-y", 7);
        settle("matching", 2);
        topic(admin, topic + "-x2", 3);
        settle("matching too", 5);
        admin.deleteTopics(List.of(topic + "-x1")).all().get();
        settle("one is gone", 3);
        close(one);
    }

    static void migrate(Admin admin, String topic) throws Exception {
        String group = "moving-" + run;
        for (int i = 0; i < 2; i++) consumer(group, "classic").subscribe(List.of(topic));
        settle("classic", 2, 2);
        describe(admin, group);
        consumer(group, "consumer").subscribe(List.of(topic));
        settle("both", 1, 1, 2);
        describe(admin, group);
        close(alive.get(0));
        settle("still both", 2, 2);
        close(alive.get(0));
        settle("newer only", 4);
        describe(admin, group);
        consumer(group, "classic").subscribe(List.of(topic));
        settle("back", 2, 2);
        close(alive.get(0));
        settle("classic again", 4);
        describe(admin, group);
        close(alive.get(0));
    }

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        run = arguments[1];
        String topic = "newer-" + run;
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        try (Admin admin = Admin.create(p)) {
            topic(admin, topic, 4);
            readAndCommit(admin, topic);
            comeAndGo(admin, topic);
            patterns(admin, topic);
            migrate(admin, topic);
        }
        say("done");
    }
}
