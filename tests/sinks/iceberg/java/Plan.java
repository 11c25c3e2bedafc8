import org.apache.hadoop.conf.Configuration;
import org.apache.iceberg.BaseTable;
import org.apache.iceberg.FileScanTask;
import org.apache.iceberg.StaticTableOperations;
import org.apache.iceberg.Table;
import org.apache.iceberg.hadoop.HadoopFileIO;
import org.apache.iceberg.io.CloseableIterable;

/** The data files of tables, as Iceberg's own library plans a scan of them: file, rows, size. */
public class Plan {
  public static void main(String[] locations) throws Exception {
    for (String location : locations) {
      Table table =
          new BaseTable(
              new StaticTableOperations(location, new HadoopFileIO(new Configuration())), location);
      try (CloseableIterable<FileScanTask> tasks = table.newScan().planFiles()) {
        for (FileScanTask task : tasks) {
          System.out.println(
              location
                  + "\t" + task.file().location()
                  + "\t" + task.file().recordCount()
                  + "\t" + task.file().fileSizeInBytes()
                  + "\t" + task.spec().specId());
        }
      }
    }
  }
}
