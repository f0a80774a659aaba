//! How many descriptors this process may have, and needs.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use crate::config::{Config, Service, Steer};

/// What the kernel programs, their maps, links and trials need at most.
const PROGRAMS: u64 = 64;

/// The control thread: the event loop, standard streams, the admin socket and checks.
const CONTROL: u64 = 48;

/// A source of origins: its thread's event loop, and its connections.
const SOURCE: u64 = 8;

/// A worker's own: the event loop, the reserve, and what must be free for it to take clients.
const WORKER: u64 = 16;

/// What `RLIMIT_NOFILE` is called where operators set it.
pub(super) const KEY: &str = "limit of open files";

/// Where they do.
const REMEDY: &str = "raise the hard limit (LimitNOFILE= of the unit, ulimit -Hn)";

/// The most descriptors that this process can have, once [`raise`] was called.
fn limit() -> Option<u64> {
    getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(_, hard)| hard)
}

/// Takes as many as the hard limit allows, whatever the shell's habit is.
pub(super) fn raise() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "raising the limit of open files");
    }
}

/// The limit and what is wrong with it, if the daemon cannot even start.
pub(super) fn obstacle(config: &Config) -> Option<(u64, String)> {
    let limit = limit()?;
    too_few(config, limit).map(|rule| (limit, rule))
}

fn too_few(config: &Config, limit: u64) -> Option<String> {
    let needed = at_start(config);
    (limit < needed).then(|| {
        format!(
            "must be at least {needed}, for {} workers with their listeners, kernel programs and a \
             few clients: {REMEDY}",
            config.workers
        )
    })
}

/// What to expect if all that the configuration allows comes at once.
#[must_use]
pub fn shortage(config: &Config) -> Option<String> {
    limit().and_then(|limit| too_few_for_all(config, limit))
}

fn too_few_for_all(config: &Config, limit: u64) -> Option<String> {
    let needed = config.services.iter().map(in_use).fold(at_start(config), u64::saturating_add);
    (limit < needed).then(|| {
        format!(
            "{KEY} = {limit}: the limits of all services together allow connections that need \
             {needed}; clients beyond that wait, or go directly if they are intercepted: {REMEDY}"
        )
    })
}

fn at_start(config: &Config) -> u64 {
    let workers = number(config.workers.get());
    let netns = u64::from(config.intercept_from_netns.is_some());
    let listeners = |service: &Service| {
        let kinds = u64::from(service.intercepts()) + u64::from(service.steer != Steer::Relay);
        number(service.listen.len()) + kinds * (2 + netns)
    };
    let listeners: u64 = config.services.iter().map(listeners).sum();
    let sources = config.services.iter().filter(|service| service.discovery.is_some()).count();
    PROGRAMS + CONTROL + SOURCE * number(sources) + workers * (WORKER + listeners)
}

/// Origin sockets, and the clients whose exchanges are under way or wait.
fn in_use(service: &Service) -> u64 {
    let limits = &service.limits;
    let all = [limits.max_connections, limits.max_requests, limits.max_pending];
    all.into_iter().map(number).fold(0, u64::saturating_add)
}

fn number(n: usize) -> u64 {
    u64::try_from(n).unwrap_or(RLIM_INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::parse;

    #[test]
    fn what_a_configuration_needs() {
        let config = parse(
            "workers = 2\n[[service]]\nname = \"web\"\nprotocol = \"http1\"\n\
             listen = [\"127.0.0.1:1\"]\nintercept = [\"10.0.0.1:80\"]\norigins = [\"10.0.0.1:80\"]\n\
             [service.limits]\nmax_connections = 100\nmax_requests = 200\nmax_pending = 300\n",
            "f",
        );
        let config = config.unwrap_or_else(|e| panic!("{e}"));
        let start = at_start(&config);
        assert_eq!(start, PROGRAMS + CONTROL + 2 * (WORKER + 1 + 2 + 2));
        assert_eq!(too_few(&config, start), None);
        let rule = too_few(&config, start - 1).unwrap();
        assert!(rule.starts_with(&format!("must be at least {start}, for 2 workers")), "{rule}");
        assert_eq!(too_few_for_all(&config, start + 600), None);
        let warning = too_few_for_all(&config, start + 599).unwrap();
        assert!(warning.starts_with(&format!("limit of open files = {}: ", start + 599)));
        assert_eq!(too_few_for_all(&config, RLIM_INFINITY), None);
    }
}
