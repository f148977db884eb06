//! The rules of reports, as a table over recorded sequences of them (`tests/report-traces`, recorded by
//! `record-reports` from whole loops): after each report what the deployment, its tasks and their steps are. The
//! expected tables lie beside the traces; `STYRMIN_UPDATE=1` writes them, and then they are to be read.
//!
//! Each trace is replayed as it was, and with only the last report of each change (an agent that was away), and with
//! every report followed by all older ones of other instances (late and repeated ones, which change nothing).

use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;
use styrmin_client::Client;
use styrmin_tests::agent::Agent;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::world::{ACTING, driver};

const LIMIT: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq)]
enum How {
    AsItWas,
    OnlyTheLast,
    WithOlderOnes,
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("report-traces")
}

struct Replay {
    server: Server,
    client: Client,
    agent: Agent,
    environment: String,
    id: String,
    instances: Vec<(String, String)>,
}

impl Replay {
    async fn start() -> Self {
        let mut server = Server::new(None);
        driver(&server.folder.path().join("drivers"), "acting", "web", "web", ACTING);
        server.up().await;
        let client = server.client();
        let (cluster, token) = client.cluster(json!({ "name": "c" })).await;
        let environment = client.environment(&cluster, "e").await;
        let agent = Agent::new(&server, &token, "agent", 1);
        Self { server, client, agent, environment, id: String::new(), instances: Vec::new() }
    }

    async fn ask(&mut self, line: &Value) {
        let asked = line["asked"].as_str().unwrap();
        if asked == "create" {
            let input = json!({ "environment": self.environment, "name": "front", "driver": line["driver"],
                "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
            self.id = self.client.create(input).await.unwrap().0;
        } else {
            self.client.ask(&self.id, asked).await.unwrap().unwrap();
        }
        self.server.drained(LIMIT).await;
        let query = "query($id: ID!) { deployment(id: $id) { newestInstance { id specDigest } } }";
        let newest = self.client.ok(query, json!({ "id": self.id })).await["deployment"]["newestInstance"].clone();
        let text = |name: &str| newest[name].as_str().unwrap_or_default().to_owned();
        self.instances.push((text("id"), text("specDigest")));
    }

    /// With the ids of this run.
    fn own(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => {
                let mut text = text.replace("$id", &self.id);
                for (number, (instance, digest)) in self.instances.iter().enumerate() {
                    text = text.replace(&format!("$instance{}", number + 1), instance);
                    text = text.replace(&format!("$digest{}", number + 1), digest);
                }
                text.into()
            }
            Value::Array(items) => items.iter().map(|item| self.own(item)).collect(),
            Value::Object(fields) => {
                let fields = fields.iter().map(|(name, value)| (name.clone(), self.own(value)));
                fields.collect::<Map<String, Value>>().into()
            }
            other => other.clone(),
        }
    }

    async fn tell(&mut self, row: &Value) {
        let mut row = self.own(row);
        if row.is_null() {
            self.agent.deployments(&[]).await;
            return;
        }
        row["namespace"] = json!(format!("styrmin-env-{}", self.environment));
        self.agent.deployments(&[row]).await;
    }

    /// State of the deployment, and of each task with its steps. Times are told by where they come from.
    async fn look(&self, row: &Value) -> String {
        let query = "query($id: ID!) { deployment(id: $id) { state activeInstance { sequence } tasks(first: 20) { nodes { workflow sequence state message steps { name state attempt message endedAt } } } } }";
        let found = self.client.ok(query, json!({ "id": self.id })).await["deployment"].clone();
        let mut text = format!(
            "  deployment {}, active {}\n",
            found["state"].as_str().unwrap(),
            found["activeInstance"]["sequence"]
        );
        let reported = row.to_string();
        for task in found["tasks"]["nodes"].as_array().unwrap().iter().rev() {
            let message = task["message"].as_str().map_or(String::new(), |message| format!(": {message}"));
            let _ = writeln!(
                text,
                "  {} {} {}{message}",
                task["workflow"].as_str().unwrap(),
                task["sequence"],
                task["state"].as_str().unwrap()
            );
            if task["state"] != "RUNNING"
                && *row != json!("last")
                && task["sequence"] != found["tasks"]["nodes"][0]["sequence"]
            {
                continue;
            }
            for step in task["steps"].as_array().unwrap() {
                let attempt =
                    if step["attempt"] == 1 { String::new() } else { format!(", attempt {}", step["attempt"]) };
                let ended = match step["endedAt"].as_str() {
                    None => "",
                    Some(at) if reported.contains(at.trim_end_matches('Z').trim_end_matches(".000")) => {
                        ", ended as reported"
                    }
                    Some(_) => ", ended now",
                };
                let message =
                    step["message"].as_str().map_or(String::new(), |message| format!(": {}", stable(message)));
                let _ = writeln!(
                    text,
                    "    {:<9} {}{attempt}{ended}{message}",
                    step["state"].as_str().unwrap(),
                    step["name"].as_str().unwrap()
                );
            }
        }
        for (number, (instance, digest)) in self.instances.iter().enumerate() {
            text = text.replace(instance, &format!("$instance{}", number + 1));
            if !digest.is_empty() {
                text = text.replace(digest, &format!("$digest{}", number + 1));
            }
        }
        text.replace(&self.id, "$id")
    }
}

/// Without what differs from run to run: commits.
fn stable(message: &str) -> String {
    if message.starts_with("Commit ") { "Commit … on main".to_owned() } else { message.to_owned() }
}

async fn replay(lines: &[Value], how: How) -> String {
    let mut replay = Replay::start().await;
    let mut table = String::new();
    let mut told: Vec<Value> = Vec::new();
    for (position, line) in lines.iter().enumerate() {
        if line["asked"].is_string() {
            replay.ask(line).await;
            let _ = writeln!(table, "asked: {}\n{}", line["asked"].as_str().unwrap(), replay.look(&Value::Null).await);
            continue;
        }
        if line["pods"].is_array() {
            let pods: Vec<Value> = replay
                .own(&line["pods"])
                .as_array()
                .unwrap()
                .iter()
                .map(|pod| {
                    let mut pod = pod.clone();
                    pod["deploymentId"] = json!(replay.id);
                    pod
                })
                .collect();
            replay.agent.report("pods", json!(pods)).await.unwrap();
            continue;
        }
        let row = &line["row"];
        let is_last = lines.get(position + 1).is_none_or(|next| next["asked"].is_string());
        // The end of a deletion proves itself by an object that was seen to go.
        let goes = row.is_null() || row["deleting"] == true;
        if how == How::OnlyTheLast && !is_last && !goes {
            continue;
        }
        replay.tell(row).await;
        let seen = replay.look(row).await;
        if how == How::WithOlderOnes && !row.is_null() {
            for older in told.iter().filter(|older| {
                !older.is_null() && older["instanceId"] != row["instanceId"] && older["deleting"] == row["deleting"]
            }) {
                replay.tell(older).await;
            }
            replay.tell(row).await;
            assert_eq!(replay.look(row).await, seen, "late and repeated reports of older instances change nothing");
        }
        told.push(row.clone());
        let word = |name: &str| row[name].as_str().unwrap_or("-").to_owned();
        let what = if row.is_null() {
            "gone".to_owned()
        } else {
            format!(
                "{} {} {}{}",
                word("instanceId"),
                word("phase"),
                word("displayState"),
                if row["deleting"] == true { " deleting" } else { "" }
            )
        };
        let _ = writeln!(table, "reported: {what}\n{seen}");
    }
    table
}

#[tokio::test(flavor = "multi_thread")]
async fn every_recorded_sequence_moves_tasks_as_the_rules_say() {
    let mut names: Vec<PathBuf> = std::fs::read_dir(folder()).unwrap().map(|file| file.unwrap().path()).collect();
    names.retain(|path| path.extension().is_some_and(|end| end == "jsonl"));
    names.sort();
    assert!(names.len() >= 7, "{names:?}");
    let mut wrong = Vec::new();
    for path in names {
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (all, last, _) = tokio::join!(
            replay(&lines, How::AsItWas),
            replay(&lines, How::OnlyTheLast),
            replay(&lines, How::WithOlderOnes)
        );
        for (table, end) in [(all, "expected"), (last, "last.expected")] {
            let expected = path.with_extension(end);
            if std::env::var_os("STYRMIN_UPDATE").is_some() {
                std::fs::write(&expected, &table).unwrap();
            } else if std::fs::read_to_string(&expected).unwrap_or_default() != table {
                let seen = std::env::temp_dir().join(expected.file_name().unwrap());
                std::fs::write(&seen, &table).unwrap();
                wrong.push(format!("{} differs; seen instead: {}", expected.display(), seen.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
