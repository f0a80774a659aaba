//! Envoy.

use std::{env, fs};

use anyhow::Result;
use serde_json::{Value, json};

use super::{Job, Proxy};
use crate::origin::listening;
use crate::process::{Launch, Process};

/// Names the binary, where it is not along `PATH`. `cargo xtask bench` sets it.
const BINARY: &str = "ENVOY_BIN";

/// Starts it.
pub fn start(proxy: &Proxy<'_>) -> Result<Process> {
    let Proxy { lab, cgroup, listen, workers, .. } = *proxy;
    let file = lab.directory().join(format!("envoy-{}.json", listen.port()));
    fs::write(&file, config(proxy).to_string())?;
    let mut server = Launch::new(env::var_os(BINARY).unwrap_or_else(|| "envoy".into()))
        .args(["--disable-hot-restart", "--log-level", "error", "--concurrency"])
        .arg(workers.to_string())
        .arg("-c")
        .arg(&file)
        .netns(&lab.host)
        .cgroup(cgroup)
        .spawn()?;
    listening(&lab.host, listen, &mut server)?;
    Ok(server)
}

fn config(proxy: &Proxy<'_>) -> Value {
    let address = |address: std::net::SocketAddr| {
        json!({"socket_address": {
            "address": address.ip().to_string(), "port_value": address.port()
        }})
    };
    let origins: Vec<_> = proxy
        .origins
        .iter()
        .map(|&origin| json!({"endpoint": {"address": address(origin)}}))
        .collect();
    let mut cluster = json!({
        "name": "origins",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "origins", "endpoints": [{"lb_endpoints": origins}]},
    });
    let mut route = json!({"cluster": "origins", "timeout": "60s"});
    match proxy.job {
        Job::Throughput => {}
        Job::Limit(limit) => {
            cluster["circuit_breakers"] = json!({"thresholds": [{"max_connections": limit}]});
        }
        Job::Faults => {
            // With its default of 10 % no origin of eight would ever be ejected, and with that of
            // 3 no more than three requests repeated at a time.
            cluster["outlier_detection"] =
                json!({"consecutive_5xx": 5, "max_ejection_percent": 20});
            cluster["circuit_breakers"] = json!({"thresholds": [{"max_retries": 1024}]});
            route["retry_policy"] = json!({
                "retry_on": "connect-failure,reset,refused-stream",
                "num_retries": 2,
                "retry_host_predicate": [typed(
                    "envoy.retry_host_predicates.previous_hosts",
                    "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate",
                    json!({}),
                )],
                "host_selection_retry_max_attempts": 5,
            });
        }
    }
    let router =
        typed("envoy.filters.http.router", "extensions.filters.http.router.v3.Router", json!({}));
    let manager = typed(
        "envoy.filters.network.http_connection_manager",
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        json!({
            "stat_prefix": "web",
            // The clients' own ids are to come back.
            "generate_request_id": false,
            "preserve_external_request_id": true,
            "route_config": {"virtual_hosts": [{
                "name": "all",
                "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "route": route}],
            }]},
            "http_filters": [router],
        }),
    );
    json!({"static_resources": {
        "listeners": [{
            "name": "web",
            "address": address(proxy.listen),
            "tcp_backlog_size": 4096,
            "filter_chains": [{"filters": [manager]}],
        }],
        "clusters": [cluster],
    }})
}

/// An extension with its configuration.
fn typed(name: &str, kind: &str, mut config: Value) -> Value {
    config["@type"] = format!("type.googleapis.com/envoy.{kind}").into();
    json!({"name": name, "typed_config": config})
}
