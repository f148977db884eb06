//! `clusters doctor`: every link between the server and a cluster, and what to do about those that are broken.

use super::{Output, found, show};
use anyhow::ensure;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::{Duration, Instant};
use styrmin_client::Client;

const QUERY: &str = "query($id: ID!) { cluster(id: $id) { name checks { link state message remedy } } }";
/// Pause between two looks.
const PAUSE: Duration = Duration::from_secs(2);

/// Shows the links; an error when one is broken, or cannot be told. `wait` for so long until they hold.
pub(crate) async fn run(client: &Client, output: Output, id: &str, wait: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + wait;
    loop {
        let data = client.execute(QUERY, json!({ "id": id })).await?;
        let cluster = found("cluster", id, &data)?;
        let checks = cluster["checks"].as_array().cloned().unwrap_or_default();
        let is_bad = |check: &&Value| check["state"] == "BROKEN" || check["state"] == "UNKNOWN";
        let bad = checks.iter().filter(is_bad).count();
        if bad > 0 && Instant::now() < until {
            tokio::time::sleep(PAUSE).await;
            continue;
        }
        match output {
            Output::Table => write!(std::io::stdout(), "{}", text(&checks))?,
            other => show(other, &cluster["checks"])?,
        }
        ensure!(bad == 0, "{bad} of {} links of cluster {} do not hold", checks.len(), cluster["name"]);
        return Ok(());
    }
}

/// A line for each link, and one with what to do.
fn text(checks: &[Value]) -> String {
    let part = |check: &Value, name: &str| check[name].as_str().unwrap_or_default().to_owned();
    let mut text = String::new();
    for check in checks {
        // Of a String, this cannot fail.
        let _ = writeln!(text, "{:<8} {}: {}", part(check, "state"), part(check, "link"), part(check, "message"));
        if let Some(remedy) = check["remedy"].as_str() {
            let _ = writeln!(text, "         → {remedy}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_link_is_followed_by_what_to_do() {
        let checks = [
            json!({ "link": "clocks", "state": "OK", "message": "they agree", "remedy": null }),
            json!({ "link": "agent reports", "state": "BROKEN", "message": "it never did", "remedy": "Install it" }),
        ];
        assert_eq!(
            text(&checks),
            "OK       clocks: they agree\nBROKEN   agent reports: it never did\n         → Install it\n"
        );
    }
}
