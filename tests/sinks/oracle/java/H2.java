import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.sql.Clob;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.sql.Statement;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;

/** H2 in Oracle mode behind a pipe: a line "session verb statement" in, a line of cells out. */
public class H2 {
    private static final String URL = "jdbc:h2:mem:oracle;MODE=Oracle;DB_CLOSE_DELAY=-1;"
            + "LOCK_TIMEOUT=1500;SCHEMA_SEARCH_PATH=ETL,PUBLIC;"
            + "INIT=CREATE SCHEMA IF NOT EXISTS ETL";

    public static void main(String[] words) throws Exception {
        BufferedReader in = new BufferedReader(
                new InputStreamReader(System.in, StandardCharsets.US_ASCII));
        PrintStream out = new PrintStream(System.out, true, StandardCharsets.US_ASCII);
        Map<String, Connection> sessions = new HashMap<>();
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            String[] parts = line.split(" ", 3);
            try {
                Connection session = sessions.get(parts[0]);
                if (session == null) {
                    session = DriverManager.getConnection(URL, "sa", "");
                    session.setAutoCommit(false);
                    sessions.put(parts[0], session);
                }
                out.println(answer(sessions, parts, session));
            } catch (SQLException error) {
                out.println("error " + error.getErrorCode() + " " + text(error.getMessage()));
            }
        }
    }

    private static String answer(Map<String, Connection> sessions, String[] parts,
            Connection session) throws SQLException {
        switch (parts[1]) {
            case "commit": session.commit(); return "done 0";
            case "rollback": session.rollback(); return "done 0";
            case "close": session.rollback(); session.close(); sessions.remove(parts[0]);
                return "done 0";
            case "alone":
                for (Connection other : sessions.values()) {
                    if (other != session) {
                        other.rollback();
                        other.close();
                    }
                }
                sessions.values().retainAll(java.util.Set.of(session));
                return "done 0";
            default: return run(session, decoded(parts[2]));
        }
    }

    private static String run(Connection session, String sql) throws SQLException {
        try (Statement statement = session.createStatement()) {
            if (!statement.execute(sql)) {
                return "done " + statement.getUpdateCount();
            }
            StringBuilder text = new StringBuilder("rows");
            ResultSet rows = statement.getResultSet();
            int width = rows.getMetaData().getColumnCount();
            while (rows.next()) {
                text.append(" |");
                for (int at = 1; at <= width; at++) {
                    text.append(' ').append(cell(rows.getObject(at)));
                }
            }
            return text.toString();
        }
    }

    private static String cell(Object value) throws SQLException {
        if (value == null) {
            return "N";
        }
        if (value instanceof Clob) {
            Clob clob = (Clob) value;
            return "S" + text(clob.getSubString(1, (int) clob.length()));
        }
        if (value instanceof Number) {
            return "I" + new BigDecimal(value.toString()).toPlainString();
        }
        if (value instanceof byte[]) {
            return "B" + Base64.getEncoder().encodeToString((byte[]) value);
        }
        return "S" + text(value.toString());
    }

    private static String text(String value) {
        return Base64.getEncoder().encodeToString(value.getBytes(StandardCharsets.UTF_8));
    }

    private static String decoded(String value) {
        return new String(Base64.getDecoder().decode(value), StandardCharsets.UTF_8);
    }
}
