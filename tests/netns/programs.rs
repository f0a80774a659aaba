//! The programs that people really have in front of their origins. Each asks an intercepted service
//! for small and for large responses, and must see what it sees without the broker.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use harness::origin::nginx;
use harness::peer::{self, Job, Proxy};
use harness::{Daemon, Lab, Process};

use crate::support::addresses;

/// Requests for `/echo`, each with an id of its own.
const REQUESTS: u64 = 20;

/// Long enough for whatever starts a language's whole runtime.
const PATIENCE: Duration = Duration::from_mins(1);

const CURL: [&str; 3] = [
    "sh",
    "-c",
    r#"for i in $(seq 20); do curl -sS -H "X-Request-Id: id-$i" "$0/echo"; done
for file in 64k 1m; do curl -sS "$0/$file" | cmp - "$1/$file" && echo $file; done"#,
];

const WGET: [&str; 3] = [
    "sh",
    "-c",
    r#"for i in $(seq 20); do wget -qO- --header "X-Request-Id: id-$i" "$0/echo"; done
for file in 64k 1m; do wget -qO- "$0/$file" | cmp - "$1/$file" && echo $file; done"#,
];

const URLLIB: [&str; 3] = [
    "/usr/bin/python3",
    "-c",
    r#"
import sys, urllib.request
url, files = sys.argv[1:]
def get(path, headers={}, **how):
    return urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), **how).read()
for i in range(1, 21):
    # With a time limit, Python makes its sockets nonblocking.
    how = {} if i % 2 else {"timeout": 30}
    print(get("/echo", {"X-Request-Id": f"id-{i}"}, **how).decode(), end="")
for file in ("64k", "1m"):
    assert get("/" + file) == open(f"{files}/{file}", "rb").read()
    print(file)
"#,
];

const REQUESTS_SESSION: [&str; 3] = [
    "/usr/bin/python3",
    "-c",
    r#"
import sys, requests
url, files = sys.argv[1:]
session = requests.Session()
session.trust_env = False
for i in range(1, 21):
    how = {} if i % 2 else {"timeout": 30}
    print(session.get(url + "/echo", headers={"X-Request-Id": f"id-{i}"}, **how).text, end="")
for file in ("64k", "1m"):
    assert session.get(url + "/" + file).content == open(f"{files}/{file}", "rb").read()
    print(file)
"#,
];

const AIOHTTP: [&str; 3] = [
    "/usr/bin/python3",
    "-c",
    r#"
import aiohttp, asyncio, sys
url, files = sys.argv[1:]
async def main():
    async with aiohttp.ClientSession() as session:
        async def get(path, headers={}):
            async with session.get(url + path, headers=headers) as response:
                return await response.read()
        asked = [get("/echo", {"X-Request-Id": f"id-{i}"}) for i in range(1, 21)]
        for answer in await asyncio.gather(*asked):
            print(answer.decode(), end="")
        for file in ("64k", "1m"):
            assert await get("/" + file) == open(f"{files}/{file}", "rb").read()
            print(file)
asyncio.run(main())
"#,
];

const NODE: [&str; 3] = [
    "node",
    "-e",
    r#"
const http = require("http"), fs = require("fs");
const [url, files] = process.argv.slice(1);
const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });
const get = (path, headers = {}) => new Promise((resolve, reject) => {
    http.get(url + path, { agent, headers }, response => {
        const pieces = [];
        response.on("data", piece => pieces.push(piece));
        response.on("end", () => resolve(Buffer.concat(pieces)));
        response.on("error", reject);
    }).on("error", reject);
});
(async () => {
    const asked = Array.from({ length: 20 }, (_, i) => get("/echo", { "X-Request-Id": `id-${i + 1}` }));
    for (const answer of await Promise.all(asked)) process.stdout.write(answer);
    for (const file of ["64k", "1m"]) {
        if (!fs.readFileSync(`${files}/${file}`).equals(await get("/" + file))) throw file;
        console.log(file);
    }
    agent.destroy();
})();
"#,
];

const PHP: [&str; 3] = [
    "php",
    "-r",
    r#"
[, $url, $files] = $argv;
for ($i = 1; $i <= 20; $i++) {
    $version = $i % 2 ? "1.1" : "1.0";
    $http = ["header" => "X-Request-Id: id-$i", "protocol_version" => $version];
    echo file_get_contents("$url/echo", false, stream_context_create(["http" => $http]));
}
foreach (["64k", "1m"] as $file) {
    if (file_get_contents("$url/$file") !== file_get_contents("$files/$file")) exit(1);
    echo "$file\n";
}
"#,
];

/// What each of them prints if every response was its own and whole.
fn expected() -> String {
    let mut all = String::new();
    for i in 1..=REQUESTS {
        writeln!(all, "id-{i}").unwrap();
    }
    all + "64k\n1m\n"
}

/// A lab with two origins that are intercepted.
struct Setup {
    lab: Lab,
    daemon: Daemon,
    _origins: [Process; 2],
}

impl Setup {
    fn new(steer: &str) -> Self {
        let lab = Lab::new(2).unwrap();
        let origins = [0, 1].map(|i| nginx::origin(&lab, i).unwrap());
        let config = format!(
            "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\nsteer = {steer:?}\n\
             intercept = [\"VIP\"]\norigins = {}\n",
            addresses(&lab.all_origins())
        );
        let daemon = Daemon::start(&lab, &config.replace("VIP", &lab.vip().to_string())).unwrap();
        Self { lab, daemon, _origins: origins }
    }

    /// Has a program ask at this address.
    fn ask(&self, [program, option, script]: [&str; 3], at: SocketAddr) -> String {
        let client = self.lab.client(program).args([option, script]).arg(format!("http://{at}"));
        let files = self.lab.directory().join("files");
        client.arg(files).output(PATIENCE).unwrap().success().unwrap()
    }

    /// How many exchanges the broker has carried; the origins have seen few connections.
    fn exchanges(&self) -> u64 {
        let handshakes = self.lab.origin_counters().passive_opens();
        assert!(handshakes <= 64, "{handshakes} handshakes at the origins");
        self.daemon.service().unwrap().exchanges
    }
}

#[track_caller]
fn check(name: &str, script: [&str; 3]) {
    for steer in ["auto", "kernel"] {
        let setup = Setup::new(steer);
        let said = setup.ask(script, setup.lab.vip());
        assert_eq!(said, expected(), "{name}, {steer}");
        assert_eq!(setup.exchanges(), REQUESTS + 2, "{name}, {steer}");
    }
}

#[test]
fn curl() {
    check("curl", CURL);
}

#[test]
fn wget() {
    check("wget", WGET);
}

#[test]
fn python_urllib() {
    check("urllib", URLLIB);
}

#[test]
fn python_requests() {
    check("requests", REQUESTS_SESSION);
}

#[test]
fn python_aiohttp() {
    check("aiohttp", AIOHTTP);
}

#[test]
fn node() {
    check("node", NODE);
}

#[test]
fn php() {
    check("php", PHP);
}

#[test]
fn ab() {
    for (steer, keep_alive) in [("auto", false), ("auto", true), ("kernel", true)] {
        let setup = Setup::new(steer);
        let ab = setup.lab.client("ab").args(["-q", "-n", "2000", "-c", "16"]);
        let ab = if keep_alive { ab.arg("-k") } else { ab };
        let ab = ab.arg(format!("http://{}/64k", setup.lab.vip()));
        let said = ab.output(PATIENCE).unwrap().success().unwrap();
        let line = |name: &str| {
            let line = said.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name:?} in {said}")).trim().to_owned()
        };
        assert_eq!(line("Complete requests:"), "2000", "{said}");
        assert_eq!(line("Failed requests:"), "0", "{said}");
        assert_eq!(line("HTML transferred:"), format!("{} bytes", 2000 * 65536), "{said}");
        assert_eq!(setup.exchanges(), 2000);
    }
}

#[test]
fn wrk() {
    for steer in ["auto", "kernel"] {
        let setup = Setup::new(steer);
        let wrk = setup.lab.client("wrk").args(["-t", "2", "-c", "16", "-d", "2s"]);
        let wrk = wrk.arg(format!("http://{}/128", setup.lab.vip()));
        let said = wrk.output(PATIENCE).unwrap().success().unwrap();
        // It only mentions what there was.
        assert!(!said.contains("Socket errors") && !said.contains("Non-2xx"), "{said}");
        let requests = said.lines().find_map(|line| line.split_once(" requests in ")).unwrap().0;
        // Those under way at the end are not counted.
        assert!(setup.exchanges() >= requests.trim().parse().unwrap(), "{said}");
    }
}

/// A proxy whose own connections to the service are intercepted, and clients of the proxy.
#[track_caller]
fn check_proxy(start: impl Fn(&Proxy<'_>) -> anyhow::Result<Process>) {
    for steer in ["auto", "kernel"] {
        let setup = Setup::new(steer);
        let listen = SocketAddr::from((setup.lab.host_ip(), 8080));
        let lab = &setup.lab;
        let proxy = Proxy {
            lab,
            cgroup: &lab.clients_cgroup,
            listen,
            origins: &[lab.vip()],
            workers: 2,
            job: Job::Throughput,
        };
        let _process = start(&proxy).unwrap();
        for script in [CURL, NODE] {
            assert_eq!(setup.ask(script, listen), expected(), "{steer}");
        }
        assert_eq!(setup.exchanges(), 2 * (REQUESTS + 2), "{steer}");
    }
}

#[test]
fn nginx_as_a_client() {
    check_proxy(peer::nginx::start);
}

#[test]
fn haproxy_as_a_client() {
    check_proxy(peer::haproxy::start);
}
