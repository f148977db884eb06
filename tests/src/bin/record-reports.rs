//! Records what agents report while a whole loop runs: `tests/report-traces/*.json`, which the test `report_rules`
//! replays. Run it anew when the operator's status or the rows of reports change:
//! `cargo run -p styrmin-tests --bin record-reports`.

use serde_json::{Map, Value, json};
use std::path::Path;
use std::time::Duration;
use styrmin_renderer::spec::StyrminDeployment;
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{ACTING, LIMIT, World, driver};

/// Between two looks: no change of a status is missed, since each takes longer.
const LOOK: Duration = Duration::from_millis(20);

/// What is asked of a deployment, one after the other, and what is waited for before the next.
struct Scenario {
    name: &'static str,
    driver: &'static str,
    asked: &'static [(&'static str, Until)],
}

enum Until {
    /// The task has ended.
    Ended,
    /// At once.
    Begun,
}

const SCENARIOS: [Scenario; 7] = [
    Scenario {
        name: "create-update-upgrade-delete",
        driver: "web-application",
        asked: &[
            ("create", Until::Ended),
            ("updateDeployment(id: $id, input: {config: {set: {env_vars: {A: \"b\"}}}})", Until::Ended),
            ("upgradeDeployment(id: $id, applicationVersion: \"1.28\")", Until::Ended),
            ("deleteDeployment(id: $id)", Until::Ended),
        ],
    },
    Scenario {
        name: "actions-around-an-upgrade",
        driver: "acting",
        asked: &[("create", Until::Ended), ("upgradeDeployment(id: $id, applicationVersion: \"1.28\")", Until::Ended)],
    },
    Scenario {
        name: "a-failing-job-and-the-next-change",
        driver: "acting",
        asked: &[
            ("create", Until::Ended),
            ("runJob(id: $id, action: \"check\")", Until::Ended),
            ("updateDeployment(id: $id, input: {config: {set: {env_vars: {A: \"b\"}}}})", Until::Ended),
        ],
    },
    Scenario {
        name: "an-image-that-cannot-be-pulled-and-a-good-one",
        driver: "web-application",
        asked: &[
            ("create", Until::Ended),
            ("upgradeDeployment(id: $id, applicationVersion: \"image-pull\")", Until::Ended),
            ("upgradeDeployment(id: $id, applicationVersion: \"1.28\")", Until::Ended),
        ],
    },
    Scenario {
        name: "a-change-that-overtakes-another",
        driver: "acting",
        asked: &[
            ("create", Until::Ended),
            ("upgradeDeployment(id: $id, applicationVersion: \"1.28\")", Until::Begun),
            ("updateDeployment(id: $id, input: {config: {set: {env_vars: {A: \"b\"}}}})", Until::Ended),
        ],
    },
    Scenario {
        name: "stop-and-start",
        driver: "web-application",
        asked: &[
            ("create", Until::Ended),
            ("stopDeployment(id: $id)", Until::Ended),
            ("startDeployment(id: $id)", Until::Ended),
        ],
    },
    Scenario {
        name: "deleted-in-the-middle-of-a-rollout",
        driver: "web-application",
        asked: &[("create", Until::Begun), ("deleteDeployment(id: $id)", Until::Ended)],
    },
];

#[tokio::main]
async fn main() {
    let world = World::start_with(|drivers| driver(drivers, "acting", "web", "web", ACTING)).await;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("report-traces");
    std::fs::create_dir_all(&folder).unwrap();
    for scenario in &SCENARIOS {
        let lines = record(&world, scenario).await;
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(folder.join(format!("{}.jsonl", scenario.name)), text.join("\n") + "\n").unwrap();
        println!("{}: {} lines", scenario.name, lines.len());
    }
}

async fn record(world: &World, scenario: &Scenario) -> Vec<Value> {
    let client = world.client();
    let mut lines = Vec::new();
    let (mut id, mut last, mut pods) = (String::new(), Value::Null, Value::Null);
    let mut instances: Vec<(String, String)> = Vec::new();
    for (asked, until) in scenario.asked {
        let task = if *asked == "create" {
            let input = json!({ "environment": world.environment, "name": scenario.name, "driver": scenario.driver,
                "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
            let (new, task) = client.create(input).await.unwrap();
            id = new;
            task
        } else {
            client.ask(&id, asked).await.unwrap().unwrap()
        };
        lines.push(json!({ "asked": asked, "driver": scenario.driver }));
        let query = "query($id: ID!) { deployment(id: $id) { newestInstance { id specDigest } } }";
        let newest = client.ok(query, json!({ "id": id })).await["deployment"]["newestInstance"].clone();
        let text = |name: &str| newest[name].as_str().unwrap_or_default().to_owned();
        instances.push((text("id"), text("specDigest")));
        let (namespace, name) = world.object(&id);
        let key = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), name.as_str()];
        let end = std::time::Instant::now() + 2 * LIMIT;
        loop {
            let object = world.plane.get(&key).await;
            let row = object.map_or(Value::Null, |object| {
                let typed: StyrminDeployment = serde_json::from_value(object).unwrap();
                styrmin_agent::rows::deployment(&typed)
            });
            let row = anonymous(row, &id, &instances);
            if row != last {
                if is_about_pods(&row) {
                    let query = "query($id: ID!) { deployment(id: $id) { pods { nodes { namespace name component phase ready restarts reason message node containers { name image ready restarts state reason message exitCode } } } } }";
                    let found = client.ok(query, json!({ "id": id })).await["deployment"]["pods"]["nodes"].clone();
                    let found = anonymous(found, &id, &instances);
                    if found != pods {
                        lines.push(json!({ "pods": found }));
                        pods = found;
                    }
                }
                lines.push(json!({ "row": row }));
                last = row;
            }
            let begun = last["instanceId"] == format!("$instance{}", instances.len());
            let done = match until {
                Until::Ended => client.task(&task).await.unwrap().state != "RUNNING",
                Until::Begun => begun,
            };
            if done {
                break;
            }
            assert!(std::time::Instant::now() < end, "{}: {asked} does not end", scenario.name);
            tokio::time::sleep(LOOK).await;
        }
    }
    lines
}

/// Failures are explained by pods.
fn is_about_pods(row: &Value) -> bool {
    row["phase"] == "Failed" || row["displayState"] == "Error"
}

/// Ids and digests by their number, so that a replay can put its own in.
fn anonymous(value: Value, id: &str, instances: &[(String, String)]) -> Value {
    match value {
        Value::String(text) => {
            let mut text = text.replace(id, "$id");
            for (number, (instance, digest)) in instances.iter().enumerate() {
                text = text.replace(instance, &format!("$instance{}", number + 1));
                if !digest.is_empty() {
                    text = text.replace(digest, &format!("$digest{}", number + 1));
                }
            }
            text.into()
        }
        Value::Array(items) => items.into_iter().map(|item| anonymous(item, id, instances)).collect(),
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(name, value)| (name, anonymous(value, id, instances)));
            fields.collect::<Map<String, Value>>().into()
        }
        other => other,
    }
}
