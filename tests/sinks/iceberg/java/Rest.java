import java.net.InetSocketAddress;
import java.util.HashMap;
import java.util.Map;
import org.apache.iceberg.CatalogUtil;
import org.apache.iceberg.catalog.Catalog;
import org.apache.iceberg.rest.RESTCatalogAdapter;
import org.apache.iceberg.rest.RESTCatalogServlet;
import org.eclipse.jetty.server.Server;
import org.eclipse.jetty.servlet.ServletContextHandler;
import org.eclipse.jetty.servlet.ServletHolder;

/** Iceberg's own REST catalog, on the loopback interface only. */
public class Rest {
  public static void main(String[] words) throws Exception {
    Map<String, String> properties = new HashMap<>();
    properties.put("catalog-impl", "org.apache.iceberg.jdbc.JdbcCatalog");
    properties.put("uri", "jdbc:sqlite:" + words[1] + "/rest.db");
    properties.put("warehouse", "file://" + words[1] + "/warehouse");
    properties.put("jdbc.schema-version", "V1");
    // One connection: of two, a reader may keep SQLite's only writer out until the request fails.
    properties.put("clients", "1");
    Catalog catalog =
        CatalogUtil.buildIcebergCatalog(
            "rest", properties, new org.apache.hadoop.conf.Configuration());
    ServletContextHandler context = new ServletContextHandler(ServletContextHandler.NO_SESSIONS);
    context.addServlet(
        new ServletHolder(new RESTCatalogServlet(new RESTCatalogAdapter(catalog))), "/*");
    Server server = new Server(new InetSocketAddress("127.0.0.1", Integer.parseInt(words[0])));
    server.setHandler(context);
    server.start();
    System.out.println("ready");
    server.join();
  }
}
