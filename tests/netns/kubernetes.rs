//! Members from a Kubernetes API server: one that behaves, one that says too much, and what has to be
//! read or run before it can be asked.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use harness::origin::scripted::{Peer, Scripted};
use harness::{Client, Daemon, Lab, Launch, daemon, eventually};

use crate::support::{SOON, listen};

/// Longer than a file or a plug-in is waited for in silence.
const TOLD: Duration = Duration::from_secs(30);

/// An API server: one slice with one endpoint, and watches that end at once.
pub(crate) fn api_server(
    origin: SocketAddr,
) -> impl Fn(&mut Peer) -> io::Result<()> + Send + Sync + 'static {
    let slice = format!(
        r#"{{"metadata": {{"name": "s", "resourceVersion": "1",
                "labels": {{"kubernetes.io/service-name": "web"}}}}, "addressType": "IPv4",
            "ports": [{{"port": {}}}], "endpoints": [{{"addresses": ["{}"]}}]}}"#,
        origin.port(),
        origin.ip()
    );
    move |peer| {
        while let Some(request) = peer.request()? {
            if request.target().contains("watch=") {
                peer.send("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")?;
                break;
            }
            peer.respond(format!(
                r#"{{"metadata": {{"resourceVersion": "1"}}, "items": [{slice}]}}"#
            ))?;
        }
        Ok(())
    }
}

/// Writes where the server is, and who asks there.
pub(crate) fn kubeconfig(lab: &Lab, server: SocketAddr, user: &str) -> PathBuf {
    let path = lab.directory().join("kubeconfig");
    let text = format!(
        "{{clusters: [{{name: c, cluster: {{server: 'http://{server}'}}}}],\n\
         users: [{{name: u, user: {user}}}],\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}], current-context: c}}"
    );
    fs::write(&path, text).unwrap();
    path
}

/// The service that is found there, at port 80.
pub(crate) fn service(lab: &Lab, kubeconfig: &Path) -> String {
    format!(
        "[[service]]\nname = \"web\"\nprotocol = \"http1\"\nlisten = [\"{}\"]\n\
         [service.discovery.kubernetes]\nservice = \"web\"\nport = 80\nkubeconfig = \"{}\"\n",
        listen(lab),
        kubeconfig.display()
    )
}

fn error(daemon: &Daemon) -> String {
    daemon.service().unwrap().membership.unwrap().error.unwrap_or_default()
}

#[track_caller]
fn told(daemon: &Daemon, what: &str) {
    eventually(TOLD, what, || error(daemon).contains(what));
}

#[track_caller]
fn served(lab: &Lab, at: SocketAddr) {
    eventually(SOON * 6, "served", || {
        Client::get_once(&lab.host, at, "/").is_ok_and(|response| response.status == 200)
    });
}

/// A plug-in that does not come back while a file is there, and notes how often it was run.
struct Plugin(PathBuf);

impl Plugin {
    /// Tokens are `expired` at once, so that it is run for each request, or good for ever.
    fn install(lab: &Lab, expired: bool) -> Self {
        let path = lab.directory().join("plug-in");
        let expiry = if expired { r#","expirationTimestamp":"2020-01-01T00:00:00Z""# } else { "" };
        let script = format!(
            "#!/bin/sh\nmkdir \"$0.runs\" || touch \"$0.twice\"\necho >> \"$0.runs.log\"\n\
             while [ -e \"$0.hangs\" ]; do sleep 0.05; done\nrmdir \"$0.runs\"\n\
             echo '{{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\
             \"status\":{{\"token\":\"t\"{expiry}}}}}'\n"
        );
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        Self(path)
    }

    fn user(&self) -> String {
        format!(
            "{{exec: {{apiVersion: client.authentication.k8s.io/v1, command: {}, \
             interactiveMode: Never}}}}",
            self.0.display()
        )
    }

    fn hang(&self) {
        fs::write(self.0.with_extension("hangs"), "").unwrap();
    }

    fn go_on(&self) {
        fs::remove_file(self.0.with_extension("hangs")).unwrap();
    }

    fn runs(&self) -> usize {
        fs::read(self.0.with_extension("runs.log")).unwrap_or_default().len()
    }

    /// Waits until it is run, and does not come back.
    #[track_caller]
    fn hangs(&self) {
        let before = self.runs();
        self.hang();
        eventually(TOLD, "the plug-in is run", || self.runs() > before);
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        fs::remove_file(self.0.with_extension("hangs")).ok();
    }
}

#[test]
fn a_plug_in_that_hangs_holds_nobody_up() {
    let lab = Lab::new(2).unwrap();
    let (api, web) = (lab.origin(0), lab.origin(1));
    let broken = Arc::new(AtomicBool::new(false));
    let (fails, answer) = (Arc::clone(&broken), api_server(web));
    let _api = Scripted::start(&lab.origins, api, move |peer: &mut Peer| {
        if fails.load(Relaxed) {
            peer.request()?;
            return peer.send("HTTP/1.1 500 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
        answer(peer)
    })
    .unwrap();
    let _origin = Scripted::http(&lab.origins, web).unwrap();
    let plugin = Plugin::install(&lab, false);
    let other = SocketAddr::new(lab.host_ip(), 8081);
    let config = format!(
        "workers = 1\n{}[[service]]\nname = \"other\"\nprotocol = \"http1\"\n\
         listen = [\"{other}\"]\norigins = [\"{web}\"]\n",
        service(&lab, &kubeconfig(&lab, api, &plugin.user()))
    );

    plugin.hang();
    let daemon = Daemon::start(&lab, &config).unwrap();
    served(&lab, other);
    told(&daemon, "its credential plug-in does not answer");
    assert_eq!(plugin.runs(), 1, "one is waited for");
    plugin.go_on();
    served(&lab, listen(&lab));
    eventually(SOON, "nothing is wrong", || error(&daemon).is_empty());

    // Whoever asks again runs it again.
    broken.store(true, Relaxed);
    plugin.hangs();
    told(&daemon, "its credential plug-in does not answer");
    served(&lab, listen(&lab));
    assert!(!plugin.0.with_extension("twice").exists(), "never two at a time");
    daemon.stop().unwrap();
}

#[test]
fn a_plug_in_that_hangs_within_a_request_holds_up_no_end() {
    let lab = Lab::new(2).unwrap();
    let (api, web) = (lab.origin(0), lab.origin(1));
    let _api = Scripted::start(&lab.origins, api, api_server(web)).unwrap();
    let _origin = Scripted::http(&lab.origins, web).unwrap();
    let plugin = Plugin::install(&lab, true);
    let config = service(&lab, &kubeconfig(&lab, api, &plugin.user()));
    let daemon = Daemon::start(&lab, &format!("workers = 1\n{config}")).unwrap();
    served(&lab, listen(&lab));
    plugin.hangs();
    daemon.stop().unwrap();
}

#[test]
fn a_pipe_that_nobody_writes_to_holds_nobody_up() {
    let lab = Lab::new(2).unwrap();
    let (api, web) = (lab.origin(0), lab.origin(1));
    let _api = Scripted::start(&lab.origins, api, api_server(web)).unwrap();
    let _origin = Scripted::http(&lab.origins, web).unwrap();
    let pipe = lab.directory().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let user = format!("{{tokenFile: {}}}", pipe.display());
    let config = service(&lab, &kubeconfig(&lab, api, &user));
    let daemon = Daemon::start(&lab, &format!("workers = 1\n{config}")).unwrap();
    told(&daemon, "a file that it names, or its credential plug-in does not answer");
    // Who reads it gets something, and a file from then on.
    let mut writer = fs::OpenOptions::new().write(true).open(&pipe).unwrap();
    let token = lab.directory().join("token");
    fs::write(&token, "token").unwrap();
    fs::rename(&token, &pipe).unwrap();
    writer.write_all(b"token").unwrap();
    drop(writer);
    served(&lab, listen(&lab));
    daemon.stop().unwrap();

    // A pipe in the place of the kubeconfig.
    fs::remove_file(&pipe).unwrap();
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let file = lab.directory().join("check.toml");
    fs::write(&file, service(&lab, &pipe)).unwrap();
    let check = Launch::new(daemon::binary().unwrap()).arg("check").arg(file);
    let check = check.netns(&lab.host).output(TOLD).unwrap();
    assert!(check.status.success() && check.stdout.contains("does not answer"), "{check:?}");
}

#[test]
fn answers_without_end_are_not_read() {
    /// What the daemon may take, whatever it is sent: a few times as much as it reads.
    const RSS_MAX: u64 = 512 << 20;
    let endless = |list: bool, beginning: &'static str, more: &'static str| {
        move |peer: &mut Peer| -> io::Result<()> {
            while let Some(request) = peer.request()? {
                if request.target().contains("watch=") == list {
                    peer.respond(r#"{"metadata": {"resourceVersion": "1"}, "items": []}"#)?;
                    continue;
                }
                peer.send(format!("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{beginning}"))?;
                let more = more.repeat((1 << 20) / more.len());
                loop {
                    peer.send(&more)?;
                }
            }
            Ok(())
        }
    };
    let list = r#"{"metadata": {"resourceVersion": "1"}, "items": ["#;
    let slices = r#"{"metadata": {"name": "s"}, "endpoints": [{}]}, "#;
    let event = r#"{"type": "ADDED", "object": {"metadata": {"name": ""#;
    for (is_list, beginning, more, told) in [
        (true, list, slices, "an answer of more than 67108864 bytes"),
        (false, event, "s", "a line of more than 67108864 bytes"),
    ] {
        let lab = Lab::new(1).unwrap();
        let api = lab.origin(0);
        let server = endless(is_list, beginning, more);
        let _api = Scripted::start(&lab.origins, api, server).unwrap();
        let config = service(&lab, &kubeconfig(&lab, api, "{}"));
        let mut daemon = Daemon::start(&lab, &format!("workers = 1\n{config}")).unwrap();
        self::told(&daemon, told);
        let rss = daemon.process().rss_peak().unwrap();
        assert!(rss < RSS_MAX, "{} MB", rss >> 20);
        daemon.stop().unwrap();
    }
}
