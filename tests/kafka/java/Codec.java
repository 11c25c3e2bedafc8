import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.ObjectSerializationCache;

/** Reads "apiKey request|response version hex" lines; prints what Kafka's own codec makes of each. */
public class Codec {
    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        HexFormat hex = HexFormat.of();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] words = line.split(" ", -1);
            ApiMessageType type = ApiMessageType.fromApiKey(Short.parseShort(words[0]));
            ApiMessage message = words[1].equals("request") ? type.newRequest() : type.newResponse();
            short version = Short.parseShort(words[2]);
            ByteBuffer buffer = ByteBuffer.wrap(hex.parseHex(words[3]));
            message.read(new ByteBufferAccessor(buffer), version);
            if (buffer.hasRemaining()) {
                System.out.println("left over: " + buffer.remaining());
                continue;
            }
            ObjectSerializationCache cache = new ObjectSerializationCache();
            ByteBuffer out = ByteBuffer.allocate(message.size(cache, version));
            message.write(new ByteBufferAccessor(out), cache, version);
            System.out.println(hex.formatHex(out.array()));
        }
    }
}
