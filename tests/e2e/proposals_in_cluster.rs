//! Reviewed changes from the request to the ready pod, and back to the forge: with real Flux and the operator.

use serde_json::{Value, json};
use std::path::Path;
use styrmin_tests::eventually;
use styrmin_tests::reviews::{Reviewed, Reviews};
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{LIMIT, World, driver};

/// What runs before an upgrade fails.
const MIGRATING: &str = "  actions:
  - {name: migrate, hook: upgrade, mode: pre, steps: [{execute: {component: web, command: [sh, -c, 'exit 3']}}]}
";

const CREATE: &str = "mutation($input: CreateDeploymentInput!) { createDeployment(input: $input) { deployment { id } task { id } proposal { id } } }";

struct Scene {
    world: World,
    reviews: Reviews,
}

impl Scene {
    async fn start(rules: Value) -> Self {
        let forge = Reviewed::start().await;
        let prepare = |folder: &Path| driver(folder, "migrating", "web", "web", MIGRATING);
        let world = World::start_reviewed(&forge, prepare, rules).await;
        let client = world.client();
        Self { world, reviews: Reviews { forge, client } }
    }

    /// Waits until the forge shows this state of a deployment on a commit; fails when it shows one of `never` before.
    async fn until_status(&self, commit: &str, name: &str, state: &str, never: &[&str]) -> String {
        let context = format!("styrmin/c/e/{name}");
        let what = format!("{context} is {state} on {commit}");
        eventually(&what, LIMIT, async || {
            let found = self.reviews.forge.statuses(commit).await;
            let (is, description) = found.get(&context).cloned().unwrap_or_default();
            assert!(!never.contains(&is.as_str()), "{what}, but was {is}: {description}");
            if is == state { Ok(description) } else { Err(found) }
        })
        .await
    }

    async fn merge_commit(&self, number: i64) -> String {
        let merged = |pull: &Value| pull["merged"] == true;
        let pull = self.reviews.forge.pull("it is merged", number, merged).await;
        pull["merge_commit_sha"].as_str().unwrap().to_owned()
    }

    async fn comments(&self, number: i64) -> String {
        let path = format!("/issues/{number}/comments");
        self.reviews.forge.api("GET", &path, &json!(null)).await.to_string()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reviewed_change_runs_and_its_commits_say_so() {
    let scene = Scene::start(json!({ "mode": "PULL_REQUEST" })).await;
    let (world, reviews) = (&scene.world, &scene.reviews);
    let forge = &reviews.forge;

    // A deployment that begins by a request.
    let input = json!({ "environment": world.environment, "name": "front", "driver": "migrating", "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
    let made = reviews.client.ok(CREATE, json!({ "input": input })).await["createDeployment"].clone();
    let id = made["deployment"]["id"].as_str().unwrap().to_owned();
    let (task, proposal) = (made["task"]["id"].as_str().unwrap(), made["proposal"]["id"].as_str().unwrap());
    let number = reviews.number(proposal).await;
    let head = reviews.proposal(proposal).await["head"].as_str().unwrap().to_owned();
    assert_eq!(forge.statuses(&head).await.len(), 0, "what is in review is no outcome, and holds up no merge");
    forge.merge(number, "merge").await;
    let commit = scene.merge_commit(number).await;
    scene.until_status(&commit, "front", "pending", &["success"]).await;
    let ended = world.until_ended(task).await;
    assert_eq!(ended["state"], "SUCCEEDED", "{ended}");
    world.until_state(&id, "RUNNING").await;
    scene.until_status(&commit, "front", "success", &["failure", "error"]).await;
    scene.until_status(&head, "front", "success", &["failure", "error"]).await;
    eventually("one comment says what happened", LIMIT, async || {
        let said = scene.comments(number).await;
        if said.contains("**front** runs") { Ok(()) } else { Err(said) }
    })
    .await;

    // One that cannot run: the failure comes back, and never a success before.
    let (task, proposal) = reviews.update(&id, json!({ "applicationVersion": "1.28" })).await;
    let number = reviews.number(&proposal).await;
    let body = forge.api("GET", &format!("/pulls/{number}"), &json!(null)).await["body"].clone();
    let body = body.as_str().unwrap();
    assert!(body.contains("application 1.27 → 1.28") && body.contains("runs migrate\n"), "{body}");
    forge.merge(number, "squash").await;
    let commit = scene.merge_commit(number).await;
    let ended = world.until_ended(&task).await;
    assert_eq!(ended["state"], "FAILED", "{ended}");
    let said = scene.until_status(&commit, "front", "failure", &["success"]).await;
    assert!(said.contains("failed"), "{said}");
    eventually("the comment says why", LIMIT, async || {
        let said = scene.comments(number).await;
        if said.contains("**front** failed") { Ok(()) } else { Err(said) }
    })
    .await;

    // Somebody reverts the merge on the forge: the deployment is as before, and runs.
    let person = forge.clone_of("main").await;
    person.git(&["revert", "--no-edit", &commit]).await;
    person.git(&["push", "--quiet", "origin", "main"]).await;
    world.until_state(&id, "RUNNING").await;
    let found =
        reviews.client.ok("query($id: ID!) { deployment(id: $id) { applicationVersion } }", json!({ "id": id })).await;
    assert_eq!(found["deployment"]["applicationVersion"], "1.27", "{found}");

    // A change in review, a direct stop, and the merge on top of it.
    let (_, proposal) = reviews.set(&id, "COLOR", "blue").await;
    let number = reviews.number(&proposal).await;
    let old = reviews.proposal(&proposal).await["head"].as_str().unwrap().to_owned();
    let stop = "mutation($id: ID!) { stopDeployment(id: $id, delivery: DIRECT) { task { id } } }";
    let stopped =
        reviews.client.ok(stop, json!({ "id": id })).await["stopDeployment"]["task"]["id"].as_str().unwrap().to_owned();
    assert_eq!(world.until_ended(&stopped).await["state"], "SUCCEEDED");
    world.until_state(&id, "STOPPED").await;
    let direct = forge.tip("main").await;
    scene.until_status(&direct, "front", "success", &["failure", "error"]).await;
    let superseded = scene.until_status(&old, "front", "error", &["success"]).await;
    assert!(superseded.contains("Superseded by change"), "{superseded}");
    reviews.until("it is built anew", &proposal, |found| found["head"] != old.as_str()).await;
    forge.merge(number, "rebase").await;
    reviews.until_state(&proposal, "MERGED").await;
    world.until_state(&id, "STOPPED").await;
    let commit = scene.merge_commit(number).await;
    scene.until_status(&commit, "front", "success", &["failure"]).await;

    // Closed: the outcome is an end as well.
    let (task, proposal) = reviews.set(&id, "COLOR", "red").await;
    let number = reviews.number(&proposal).await;
    let head = reviews.proposal(&proposal).await["head"].as_str().unwrap().to_owned();
    forge.api("PATCH", &format!("/pulls/{number}"), &json!({ "state": "closed" })).await;
    let said = scene.until_status(&head, "front", "error", &["success"]).await;
    assert!(said.contains("closed"), "{said}");
    assert_eq!(world.until_ended(&task).await["state"], "REJECTED");
    let timeline = "query($id: ID!) { deployment(id: $id) { timeline(first: 200) { nodes { kind title message } } } }";
    let timeline = reviews.client.ok(timeline, json!({ "id": id })).await.to_string();
    for part in ["\"REVIEW\"", "In review", "Proposed", "was closed"] {
        assert!(timeline.contains(part), "{part}: {timeline}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_deployments_follow_one_approved_request() {
    let rules = json!({ "mode": "PULL_REQUEST", "autoMerge": true, "mergeMethod": "SQUASH", "draft": false });
    let scene = Scene::start(rules).await;
    let (world, reviews) = (&scene.world, &scene.reviews);
    let (forge, client) = (&reviews.forge, &reviews.client);
    let create = "mutation($input: CreateDeploymentInput!) { createDeployment(input: $input, delivery: DIRECT) { deployment { id } task { id } } }";
    let (mut ids, mut tasks) = (Vec::new(), Vec::new());
    for index in 0..30 {
        let input = json!({ "environment": world.environment, "name": format!("web-{index:02}"), "driver": "web-application", "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
        let made = client.ok(create, json!({ "input": input })).await["createDeployment"].clone();
        ids.push(made["deployment"]["id"].as_str().unwrap().to_owned());
        tasks.push(made["task"]["id"].as_str().unwrap().to_owned());
    }
    for task in &tasks {
        assert_eq!(world.until_ended(task).await["state"], "SUCCEEDED");
    }
    let update = "mutation($id: ID!, $config: ConfigPatch!) { updateEnvironment(id: $id, config: $config) { fanOut { id proposal { id } } } }";
    let config = json!({ "set": { "env_vars": { "COLOR": "blue" } } });
    let asked = client.ok(update, json!({ "id": world.environment, "config": config })).await;
    let fan_out = asked["updateEnvironment"]["fanOut"]["id"].as_str().unwrap().to_owned();
    let proposal = asked["updateEnvironment"]["fanOut"]["proposal"]["id"].as_str().unwrap().to_owned();
    let number = reviews.number(&proposal).await;

    // The base moves under one of them: the branch is built anew, and can be merged.
    let direct = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input, delivery: DIRECT) { task { id } } }";
    let input = json!({ "config": { "set": { "env_vars": { "SIZE": "large" } } } });
    client.ok(direct, json!({ "id": ids[0], "input": input })).await;
    let branch = reviews.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();
    let variable =
        |document: &Value, name: &str| document["spec"]["context"]["instance"]["config"]["env_vars"][name].clone();
    eventually("the branch is on the new base", LIMIT, async || {
        let found = reviews.document(&branch, &ids[0]).await.unwrap();
        if variable(&found, "SIZE") == "large" && variable(&found, "COLOR") == "blue" { Ok(()) } else { Err(found) }
    })
    .await;
    // Somebody wants another color for one of them.
    let person = forge.clone_of(&branch).await;
    let path = person.path(&ids[1]);
    let text = std::fs::read_to_string(person.work().join(&path)).unwrap();
    std::fs::write(person.work().join(&path), text.replace("blue", "green")).unwrap();
    person.git(&["commit", "--quiet", "-am", "Rather green"]).await;
    person.git(&["push", "--quiet", "origin", &branch]).await;
    let green = |pull: &Value| pull["body"].as_str().is_some_and(|body| body.contains("`green`"));
    forge.pull("the description says green", number, green).await;
    assert_eq!(reviews.proposal(&proposal).await["state"], "OPEN", "nobody approved");
    forge.approve(number).await;
    reviews.until_state(&proposal, "MERGED").await;
    let commit = scene.merge_commit(number).await;
    for index in 0..30 {
        scene.until_status(&commit, &format!("web-{index:02}"), "success", &["failure", "error"]).await;
    }
    for id in &ids {
        world.until_state(id, "RUNNING").await;
        let found = reviews.document("main", id).await.unwrap();
        assert_eq!(variable(&found, "COLOR"), if *id == ids[1] { "green" } else { "blue" });
        assert_eq!(found["spec"]["instanceId"], reviews.deployment(id).await["newestInstance"]["id"]);
    }
    let query = "query($id: ID!) { fanOut(id: $id) { state changed { total running succeeded superseded } } }";
    let changed = client.ok(query, json!({ "id": fan_out })).await["fanOut"]["changed"].clone();
    assert_eq!((changed["running"].as_i64(), changed["succeeded"].as_i64()), (Some(0), Some(30)), "{changed}");
    assert_eq!(forge.pulls().await.len(), 1);
    eventually("one comment says what happened", LIMIT, async || {
        let said = scene.comments(number).await;
        if said.contains("Rolled out: 30 succeeded") { Ok(()) } else { Err(said) }
    })
    .await;
}
