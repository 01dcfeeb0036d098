"""A real HDFS: one NameNode and some DataNodes, which are Java processes on loopback."""

from tests.stores.install import require
from tests.stores.servers import Daemons, free_port, run

_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"


class Hdfs(Daemons):
    """HDFS 2.7.3, RPC only. The processes are ``namenode``, ``datanode1``, ``datanode2``, ...

    ``replication`` of new files: by default, each DataNode has a copy. ``url`` has no path. Clients
    may take any user name. A DataNode counts as lost 12 s after its last heartbeat.
    """

    def __init__(self, folder, datanodes=1, replication=None):
        super().__init__(folder)
        self._jars = require("hdfs")
        self.replication = replication or datanodes
        self.configuration = folder / "conf"
        self.port = free_port()
        self.url = f"hdfs://127.0.0.1:{self.port}"
        self.datanodes = [f"datanode{number + 1}" for number in range(datanodes)]

    def start(self):
        folder = self.folder
        for name in ("hdfs", "datanode"):  # the web pages, which are not among the jars
            (folder / "web" / "webapps" / name / "WEB-INF").mkdir(parents=True)
            (folder / "web" / "webapps" / name / "WEB-INF" / "web.xml").write_text("<web-app/>")
        properties = {
            "fs.defaultFS": self.url,
            "hadoop.tmp.dir": f"{folder}/tmp",
            "dfs.replication": self.replication,
            "dfs.namenode.name.dir": f"file://{folder}/namenode",
            "dfs.namenode.rpc-address": f"127.0.0.1:{self.port}",
            # DataNodes report the ports that they get. Nobody needs those of the web pages.
            **{
                f"dfs.{address}": "127.0.0.1:0"
                for address in (
                    *("namenode.http-address", "datanode.address"),
                    *("datanode.http.address", "datanode.ipc.address"),
                )
            },
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.webhdfs.enabled": "false",
            "dfs.permissions.enabled": "false",
            "dfs.namenode.fs-limits.min-block-size": 0,
            "dfs.namenode.safemode.extension": 0,
            "ipc.client.connect.max.retries": 1,
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.heartbeat.recheck-interval": 1000,
        }
        text = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>\n"
            for name, value in properties.items()
        )
        self.configuration.mkdir()
        for file in ("core-site.xml", "hdfs-site.xml"):
            (self.configuration / file).write_text(f"<configuration>\n{text}</configuration>\n")
        (self.configuration / "log4j.properties").write_text(_LOG4J)
        run(*self._java(256), _NAMENODE, "-format", "-force", "-nonInteractive")
        self.resume()

    def resume(self, *names):
        """Start the named processes again on the same data, by default all that have ended.

        Return when each of their DataNodes has reported its blocks. After a restart of the
        NameNode, that is each one that runs, and the NameNode has left safe mode.
        """
        names = names or tuple(n for n in ("namenode", *self.datanodes) if not self._runs(n))
        restarted = "namenode" in names
        awaited = {
            name: "Successfully sent block report"
            for name in self.datanodes
            if name in names or (restarted and self._runs(name))
        }
        awaited |= {"namenode": "STATE* Leaving safe mode"} if restarted else {}
        seen = {name: len(self._log(name)) for name in awaited}
        for name in names:
            self._spawn(name)
        self.wait_until(
            lambda: all(text in self._log(name)[seen[name] :] for name, text in awaited.items())
        )

    def admin(self, *arguments):
        """Run `hdfs dfsadmin`."""
        run(*self._java(256), "org.apache.hadoop.hdfs.tools.DFSAdmin", *arguments)

    def _runs(self, name):
        return name in self.processes and self.processes[name].poll() is None

    def _log(self, name):
        file = self.folder / f"{name}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def _spawn(self, name):
        data = f"dfs.datanode.data.dir=file://{self.folder}/{name}"
        program = [_NAMENODE] if name == "namenode" else [_DATANODE, "-D", data]
        self.spawn(name, *self._java(512), *program)

    def _java(self, heap):
        """Return the command that runs a class with a heap of up to ``heap`` MiB."""
        opened = ("lang", "nio", "util", "net", "io")
        packages = [*(f"java.{name}" for name in opened), "sun.nio.ch", "jdk.internal.ref"]
        return [
            *("java", f"-Xmx{heap}m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            "-Djava.net.preferIPv4Stack=true",
            f"-Dhadoop.log.dir={self.folder}",
            "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
            *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in packages),
            *("-cp", f"{self.configuration}:{self.folder}/web:{self._jars}/*"),
        ]


_LOG4J = """log4j.rootLogger=INFO,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.target=System.err
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d{HH:mm:ss,SSS} %p %c{1}: %m%n
"""
