//! The server as a program: schema file, health, metrics, graceful stop, first token.

use serde_json::json;
use std::time::Duration;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{git, http};

/// The schema that clients generate code from is a committed file; `STYRMIN_UPDATE=1` writes it.
#[test]
fn the_committed_schema_is_the_schema() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/schema.graphql");
    let now = styrmin_server::api::graphql::sdl();
    if std::env::var_os("STYRMIN_UPDATE").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), now, "run this test with STYRMIN_UPDATE=1");
}

/// What a cluster needs of ours is a committed file too.
#[test]
fn the_committed_kind_is_the_kind() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm/agent/crds/styrmindeployments.yaml");
    let now = format!(
        "# Generated from renderer/src/spec.rs: STYRMIN_UPDATE=1 cargo test -p styrmin-tests server::\n{}",
        styrmin_renderer::yaml::to_string(&styrmin_renderer::spec::crd()).unwrap()
    );
    if std::env::var_os("STYRMIN_UPDATE").is_some() {
        std::fs::write(&path, &now).unwrap();
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), now, "run this test with STYRMIN_UPDATE=1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_finishes_what_is_under_way_and_a_start_goes_on() {
    let mut server = Server::start().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let repository = server.hosted(&cluster);
    server.drained(Duration::from_secs(30)).await;
    git::hook(&repository, "pre-receive", "sleep 1");
    let (deployment, task) = client.web(&environment, "shop").await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let process = rustix::process::Pid::from_raw(server.process()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    assert!(server.ended().await.success());
    assert!(git::files(&repository).await.keys().any(|path| path.contains(&deployment)), "the push was let finish");
    let token = server.token();
    server.up().await;
    assert_eq!(server.token(), token, "the first token stays");
    assert!(client.task(&task).await.unwrap().pushed());
}

#[tokio::test(flavor = "multi_thread")]
async fn health_needs_no_token_and_metrics_count() {
    let server = Server::start().await;
    let get = |path: &str| http().get(format!("{}{path}", server.address())).send();
    assert_eq!(get("/healthz").await.unwrap().text().await.unwrap(), "ok");
    assert_eq!(get("/readyz").await.unwrap().text().await.unwrap(), "ok");
    assert_eq!(get("/nothing").await.unwrap().status(), 404);
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    client.web(&environment, "shop").await;
    server.drained(Duration::from_secs(30)).await;
    let metrics = http()
        .get(format!("{}/metrics", server.address()))
        .bearer_auth(server.token())
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    for line in [
        "styrmin_changes_total{workflow=\"create\"} 1",
        "styrmin_committed_instances_total 1",
        "styrmin_outbox_waiting 0",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is missing in {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_paged_and_values_carry_their_origin() {
    let server = Server::start().await;
    let client = server.client();
    let (cluster, _) = client
        .cluster(
            json!({ "name": "c", "config": { "fqdn_suffix": "a.io", "env_vars": { "A": "cluster", "B": "cluster" } } }),
        )
        .await;
    let environment = client.environment(&cluster, "e").await;
    let patch = "mutation($id: ID!) { updateEnvironment(id: $id, config: { set: { env_vars: { B: \"environment\" } } }) { environment { config } } }";
    client.ok(patch, json!({ "id": environment })).await;
    for number in 0..7 {
        client.web(&environment, &format!("d{number}")).await;
    }
    let (mut names, mut after) = (Vec::new(), serde_json::Value::Null);
    loop {
        let query = "query($after: String) { deployments(first: 3, after: $after) { nodes { id name } pageInfo { hasNextPage endCursor } } }";
        let page = client.ok(query, json!({ "after": after })).await["deployments"].clone();
        names.extend(page["nodes"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap().to_owned()));
        if page["pageInfo"]["hasNextPage"] == false {
            break;
        }
        after = page["pageInfo"]["endCursor"].clone();
    }
    assert_eq!(names, (0..7).map(|number| format!("d{number}")).collect::<Vec<_>>());

    let list = client.ok("{ deployments(first: 1) { nodes { id } } }", json!({})).await;
    let id = list["deployments"]["nodes"][0]["id"].as_str().unwrap().to_owned();
    client.set_variable(&id, "C", "deployment").await.unwrap();
    let query =
        "query($id: ID!) { deployment(id: $id) { values { field value origin } instances { nodes { id sequence } } } }";
    let data = client.ok(query, json!({ "id": id })).await;
    for expected in [
        json!({ "field": "config.env_vars.A", "value": "cluster", "origin": "CLUSTER" }),
        json!({ "field": "config.env_vars.B", "value": "environment", "origin": "ENVIRONMENT" }),
        json!({ "field": "config.env_vars.C", "value": "deployment", "origin": "DEPLOYMENT" }),
        json!({ "field": "config.ingress_class", "value": "traefik", "origin": "STYRMIN" }),
        json!({ "field": "config.components.web.replicas", "value": 1, "origin": "DRIVER" }),
        json!({ "field": "parameters.container_port", "value": 8080, "origin": "DRIVER" }),
        json!({ "field": "parameters.image", "value": "nginx", "origin": "DEPLOYMENT" }),
    ] {
        assert!(
            data["deployment"]["values"].as_array().unwrap().contains(&expected),
            "{expected} is missing in {data}"
        );
    }
    // The difference of any two instances, by value and as text.
    let nodes = &data["deployment"]["instances"]["nodes"];
    let query = "query($from: ID, $to: ID!) { instanceDiff(from: $from, to: $to) { changes { field old new added } document } }";
    let diff = client.ok(query, json!({ "from": nodes[1]["id"], "to": nodes[0]["id"] })).await["instanceDiff"].clone();
    let changes = diff["changes"].to_string();
    assert!(
        changes.contains("context.instance.config.env_vars.C") && changes.contains("context.components.web.env_vars.C"),
        "{changes}"
    );
    assert!(diff["document"].as_str().unwrap().contains("+          C: deployment\n"), "{diff}");
}
