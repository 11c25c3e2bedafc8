import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.List;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.utils.Utils;

/**
 * "encode compression pid epoch sequence transactional record record …" prints a batch in hex;
 * a record is "timestamp:key:value:name=value;name=value", all in hex, "-" for null.
 * "decode hex" prints the records of a batch in the same words. "murmur2 hex" prints the hash.
 */
public class Batches {
    static final HexFormat HEX = HexFormat.of();

    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split(" ", -1);
            switch (words[0]) {
                case "encode" -> System.out.println(encode(words));
                case "decode" -> System.out.println(decode(words[1]));
                default -> System.out.println(Utils.murmur2(bytes(words[1])));
            }
        }
    }

    static byte[] bytes(String text) {
        return text.equals("-") ? null : HEX.parseHex(text);
    }

    static String text(ByteBuffer value) {
        return value == null ? "-" : HEX.formatHex(Utils.toArray(value));
    }

    static String encode(String[] words) {
        List<SimpleRecord> records = new ArrayList<>();
        for (String word : Arrays.asList(words).subList(6, words.length)) {
            String[] parts = word.split(":", -1);
            List<Header> headers = new ArrayList<>();
            for (String pair : parts[3].isEmpty() ? new String[0] : parts[3].split(";", -1)) {
                String[] sides = pair.split("=", -1);
                headers.add(new RecordHeader(new String(bytes(sides[0])), bytes(sides[1])));
            }
            records.add(new SimpleRecord(Long.parseLong(parts[0]), bytes(parts[1]), bytes(parts[2]),
                    headers.toArray(new Header[0])));
        }
        Compression compression = Compression.of(words[1]).build();
        SimpleRecord[] all = records.toArray(new SimpleRecord[0]);
        MemoryRecords made = Boolean.parseBoolean(words[5])
                ? MemoryRecords.withTransactionalRecords(compression, Long.parseLong(words[2]),
                        Short.parseShort(words[3]), Integer.parseInt(words[4]), all)
                : MemoryRecords.withIdempotentRecords(compression, Long.parseLong(words[2]),
                        Short.parseShort(words[3]), Integer.parseInt(words[4]), all);
        return text(made.buffer());
    }

    static String decode(String hex) {
        StringBuilder out = new StringBuilder();
        for (RecordBatch batch : MemoryRecords.readableRecords(ByteBuffer.wrap(bytes(hex))).batches()) {
            batch.ensureValid();
            for (Record record : batch) {
                if (batch.isControlBatch()) {
                    out.append(ControlRecordType.parse(record.key())).append(' ');
                    continue;
                }
                out.append(record.timestamp()).append(':').append(text(record.key())).append(':');
                out.append(text(record.value())).append(':');
                List<String> headers = new ArrayList<>();
                for (Header header : record.headers()) {
                    ByteBuffer value = header.value() == null ? null : ByteBuffer.wrap(header.value());
                    headers.add(HEX.formatHex(header.key().getBytes()) + "=" + text(value));
                }
                out.append(String.join(";", headers)).append(' ');
            }
        }
        return out.toString().trim();
    }
}
