//! Records what an agent and a server say to each other while a whole loop runs: `tests/traffic/NAME.jsonl`, which the
//! test `upgrades` replays with the build of now. Before a release, with the programs of the build before (the agent's
//! for `agent-before`, the server's for `server-before`) beside this one:
//! `record-traffic agent-before`, `record-traffic server-before`.

use serde_json::json;
use std::fmt::Write as _;
use std::time::Duration;
use styrmin_tests::plane::Program;
use styrmin_tests::server::Api as _;
use styrmin_tests::traffic::{Tap, Through, file};
use styrmin_tests::world::{self, World};

#[tokio::main]
async fn main() {
    let name = std::env::args().nth(1).expect("agent-before or server-before");
    let world = World::start().await;
    world.agent.kill().await;
    let tap = Tap::open(Through { server: world.server.address() }).await;
    let account = world::account(&world.plane).await;
    let recipe = world::agent(
        "recorded",
        world.plane.folder(),
        &world.plane.kubeconfig_of("recorded", &account),
        &[
            ("STYRMIN_SERVER_ADDRESS", &tap.address),
            ("STYRMIN_AGENT_TOKEN", &world.token),
            ("STYRMIN_AGENT_IDENTITY", "recorded"),
            ("STYRMIN_REPORT_INTERVAL", "1"),
            ("STYRMIN_OPERATOR_TIMER", "5"),
            ("STYRMIN_LEASE_DURATION", "5"),
            ("STYRMIN_LOG", "info"),
        ],
    );
    let agent = Program::start(recipe, world.plane.logs());
    let input = json!({ "environment": world.environment, "name": "database", "driver": "postgresql",
        "applicationVersion": "17", "parameters": { "password": "not-to-be-seen" } });
    let (id, task) = world.client().create(input).await.unwrap();
    world.until_ended(&task).await;
    let task = world.update(&id, json!({ "config": { "set": { "env_vars": { "A": "b" } } } })).await;
    world.until_ended(&task).await;
    let data = world
        .client()
        .ok("mutation($id: ID!) { deleteDeployment(id: $id) { task { id } } }", json!({ "id": id }))
        .await;
    world.until_ended(data["deleteDeployment"]["task"]["id"].as_str().unwrap()).await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    drop(agent);
    let mut text = String::new();
    for one in tap.exchanges() {
        let line = json!({ "request": one.request, "response": one.response });
        writeln!(text, "{line}").unwrap();
    }
    assert!(!text.contains("not-to-be-seen"));
    std::fs::create_dir_all(file(&name).parent().unwrap()).unwrap();
    std::fs::write(file(&name), text).unwrap();
}
