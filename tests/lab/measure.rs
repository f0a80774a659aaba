//! One run of load, and everything that is counted meanwhile.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use harness::load::{self, Plan, Report};
use harness::{Cgroup, Lab};

use crate::interrupt;
use crate::text::us;

/// What one run came to.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) report: Report,
    /// PassiveOpens in the origins' namespace.
    pub(crate) origin_handshakes: u64,
    /// Change of the number of TIME_WAIT sockets in the origins' namespace.
    pub(crate) origin_time_wait: u64,
    /// ActiveOpens in the host's namespace.
    pub(crate) host_active_opens: u64,
    pub(crate) cpu: Cpu,
}

/// Processor time by party.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Cpu {
    pub(crate) clients: Duration,
    pub(crate) proxy: Duration,
    pub(crate) origins: Duration,
    /// Everything else on this machine.
    pub(crate) others: Duration,
}

impl Cpu {
    fn read(lab: &Lab, proxy: Option<&Cgroup>) -> Result<Self> {
        let clients = lab.clients_cgroup.cpu_time()?;
        let proxy = proxy.map_or(Ok(Duration::ZERO), Cgroup::cpu_time)?;
        let origins = lab.origins_cgroup.cpu_time()?;
        let others = machine_busy()?.saturating_sub(clients + proxy + origins);
        Ok(Self { clients, proxy, origins, others })
    }

    fn since(self, earlier: Self) -> Self {
        Self {
            clients: self.clients.saturating_sub(earlier.clients),
            proxy: self.proxy.saturating_sub(earlier.proxy),
            origins: self.origins.saturating_sub(earlier.origins),
            others: self.others.saturating_sub(earlier.others),
        }
    }

    /// Of all parties of the run.
    pub(crate) fn total(&self) -> Duration {
        self.clients + self.proxy + self.origins
    }
}

impl Run {
    /// Microseconds of processor time per request.
    pub(crate) fn per_request(&self, time: Duration) -> f64 {
        us(time) / self.report.requests.max(1) as f64
    }
}

/// Runs `plan` in `lab`; `proxy` is the cgroup whose processor time counts as the proxy's.
/// `meanwhile` is called all the time, with the number of finished requests.
pub(crate) fn run(
    lab: &Lab,
    proxy: Option<&Cgroup>,
    plan: &Plan,
    mut meanwhile: impl FnMut(u64) -> Result<()>,
) -> Result<Run> {
    interrupt::check()?;
    let told = lab.directory().join("progress");
    let plan = Plan { progress: Some(told.clone()), ..plan.clone() };
    let (origins, host) = (lab.origin_counters(), lab.host_counters());
    let cpu = Cpu::read(lab, proxy)?;
    let mut generator = load::start(lab, &plan)?;
    while generator.is_running() {
        interrupt::check()?;
        let done = fs::read_to_string(&told).unwrap_or_default();
        meanwhile(done.trim().parse().unwrap_or(0))?;
        thread::sleep(Duration::from_millis(10));
    }
    let report = generator.finish()?;
    let cpu = Cpu::read(lab, proxy)?.since(cpu);
    let (origins, host) = (lab.origin_counters().since(&origins), lab.host_counters().since(&host));
    Ok(Run {
        report,
        origin_handshakes: origins.passive_opens().try_into()?,
        // Old ones may have expired meanwhile.
        origin_time_wait: origins.time_wait().try_into().unwrap_or(0),
        host_active_opens: host.active_opens().try_into()?,
        cpu,
    })
}

/// Time during which the machine's processors have not been idle.
fn machine_busy() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("empty /proc/stat")?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
    // user nice system idle iowait irq softirq; steal is not ours, guest is within user.
    let busy = ticks.iter().take(7).sum::<u64>() - ticks.iter().skip(3).take(2).sum::<u64>();
    Ok(Duration::from_millis(busy * 10))
}
