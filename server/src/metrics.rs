//! What `/metrics` shows. Counters are process-wide; labels have few values.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::LazyLock;

type Label = [(&'static str, String); 1];

struct Metrics {
    registry: Registry,
    changes: Family<Label, Counter>,
    conflicts: Counter,
    commits: Counter,
    committed_instances: Counter,
    push_failures: Family<Label, Counter>,
    requests: Family<Label, Counter>,
    reports: Family<Label, Counter>,
    report_rows: Counter,
    report_ignored: Counter,
    outbox: Gauge,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(|| {
    let mut registry = Registry::with_prefix("styrmin");
    let metrics = Metrics {
        changes: Family::default(),
        conflicts: Counter::default(),
        commits: Counter::default(),
        committed_instances: Counter::default(),
        push_failures: Family::default(),
        requests: Family::default(),
        reports: Family::default(),
        report_rows: Counter::default(),
        report_ignored: Counter::default(),
        outbox: Gauge::default(),
        registry: Registry::default(),
    };
    registry.register("changes", "Accepted changes by workflow", metrics.changes.clone());
    registry.register("change_conflicts", "Changes computed again because a row moved", metrics.conflicts.clone());
    registry.register("commits", "Commits pushed", metrics.commits.clone());
    registry.register("committed_instances", "Instances named in pushed commits", metrics.committed_instances.clone());
    registry.register("push_failures", "Failed rounds of repository writers by cause", metrics.push_failures.clone());
    registry.register("requests", "Answered HTTP requests by status", metrics.requests.clone());
    registry.register("reports", "Reports of agents by result", metrics.reports.clone());
    registry.register("report_rows", "Rows that reports changed", metrics.report_rows.clone());
    registry.register("report_ignored", "Reported objects that were left out", metrics.report_ignored.clone());
    registry.register("outbox_waiting", "Rows waiting for a repository", metrics.outbox.clone());
    Metrics { registry, ..metrics }
});

/// Accepted changes of one workflow.
pub fn changes(workflow: &str) -> Counter {
    METRICS.changes.get_or_create(&[("workflow", workflow.to_owned())]).clone()
}

/// Changes computed again.
pub fn change_conflicts() -> Counter {
    METRICS.conflicts.clone()
}

/// A pushed commit that names this many instances.
pub fn pushed(instances: usize) {
    METRICS.commits.inc();
    METRICS.committed_instances.inc_by(instances as u64);
}

/// A failed round of a writer.
pub fn push_failed(cause: &str) {
    METRICS.push_failures.get_or_create(&[("cause", cause.to_owned())]).inc();
}

/// An answered request.
pub fn request(status: u16) {
    METRICS.requests.get_or_create(&[("status", status.to_string())]).inc();
}

/// A report of an agent, by what became of it.
pub fn report(result: &str) {
    METRICS.reports.get_or_create(&[("result", result.to_owned())]).inc();
}

/// Rows of observed state that a report changed.
pub fn report_rows(rows: usize) {
    METRICS.report_rows.inc_by(rows as u64);
}

/// Reported objects that are not the cluster's.
pub fn report_ignored(objects: usize) {
    METRICS.report_ignored.inc_by(objects as u64);
}

/// In the Prometheus text format; `waiting` rows are in the outbox.
///
/// # Errors
/// When the registry cannot be written.
pub fn text(waiting: i64) -> Result<String, std::fmt::Error> {
    METRICS.outbox.set(waiting);
    let mut text = String::new();
    encode(&mut text, &METRICS.registry)?;
    Ok(text)
}
