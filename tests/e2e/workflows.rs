//! What people can ask of a deployment, as far as the server decides it: previews, components, jobs, going back.

use serde_json::{Value, json};
use std::time::Duration;
use styrmin_client::Client;
use styrmin_renderer::yaml;
use styrmin_tests::agent::Agent;
use styrmin_tests::git;
use styrmin_tests::server::{Api as _, Server, ctl};
use styrmin_tests::world::driver;

const LIMIT: Duration = Duration::from_secs(30);
/// A driver with jobs.
const JOBS: &str = "  actions:
  - {name: dump, hook: job, mode: core, steps: [{execute: {component: web, command: [dump]}}]}
  - {name: check, hook: job, mode: core, steps: [{execute: {component: web, command: [check]}}]}
";

struct Place {
    server: Server,
    client: Client,
    cluster: String,
    environment: String,
    agent: Agent,
}

async fn place() -> Place {
    let mut server = Server::new(None);
    driver(&server.folder.path().join("drivers"), "jobs", "web", "web", JOBS);
    server.up().await;
    let client = server.client();
    let key = age::x25519::Identity::generate().to_public().to_string();
    let (cluster, token) = client.cluster(json!({ "name": "c", "ageRecipient": key })).await;
    let environment = client.environment(&cluster, "e").await;
    let agent = Agent::new(&server, &token, "agent-1", 1);
    Place { server, client, cluster, environment, agent }
}

impl Place {
    async fn jobs(&self, name: &str) -> String {
        let input = json!({ "environment": self.environment, "name": name, "driver": "jobs",
            "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
        self.client.create(input).await.unwrap().0
    }

    /// The agent says where the newest instance of a deployment is, as far as it is in the repository.
    async fn tell(&mut self, id: &str, phase: &str, more: Value) {
        self.server.drained(LIMIT).await;
        let query = "query($id: ID!) { deployment(id: $id) { newestInstance { id specDigest } } }";
        let found = self.client.ok(query, json!({ "id": id })).await;
        let instance = &found["deployment"]["newestInstance"];
        let mut object = json!({ "deploymentId": id, "uid": "object-1", "name": format!("styrmin-{id}"),
            "namespace": format!("styrmin-env-{}", self.environment), "instanceId": instance["id"],
            "specDigest": instance["specDigest"], "phase": phase, "generation": 1, "deleting": false,
            "displayState": if phase == "Ready" { "Running" } else { phase }, "conditions": [], "steps": [] });
        object.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.agent.deployments(&[object]).await;
    }
}

/// The newest instance: id, sequence, spec.
async fn newest(client: &Client, id: &str) -> Value {
    let query = "query($id: ID!) { deployment(id: $id) { newestInstance { id sequence document } } }";
    let mut found = client.ok(query, json!({ "id": id })).await["deployment"]["newestInstance"].clone();
    let document: Value = yaml::from_str(found["document"].as_str().unwrap()).unwrap();
    found["spec"] = document["spec"].clone();
    found
}

const PREVIEW: &str = "query($change: ChangeInput!) { previewChange(change: $change) { workflow steps warnings document \
    changes { field old new added removed origin } objects { kind name added removed diff } } }";

async fn preview(client: &Client, change: Value) -> Value {
    client.ok(PREVIEW, json!({ "change": change })).await["previewChange"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preview_says_what_the_change_then_does_and_changes_nothing() {
    let Place { server: _server, client, environment, .. } = place().await;
    let input = json!({ "environment": environment, "name": "front", "driver": "jobs", "applicationVersion": "1.27",
        "parameters": { "image": "nginx" } });
    let seen = preview(&client, json!({ "createDeployment": input })).await;
    assert_eq!(seen["workflow"], "create");
    let none = client.ok("{ deployments { nodes { id } } tasks { nodes { id } } }", json!({})).await;
    assert_eq!(none, json!({ "deployments": { "nodes": [] }, "tasks": { "nodes": [] } }));
    let kinds: Vec<&str> =
        seen["objects"].as_array().unwrap().iter().map(|one| one["kind"].as_str().unwrap()).collect();
    for kind in ["HelmRelease", "Namespace", "NetworkPolicy", "Secret"] {
        assert!(kinds.contains(&kind), "{kinds:?}");
    }
    let (id, _) = client.create(input).await.unwrap();

    let set = |key: &str, value: &str| json!({ "config": { "set": { "env_vars": { key: value } } } });
    let cases = [
        ("updateDeployment", json!({ "id": id, "input": set("A", "b") }), "update"),
        ("upgradeDeployment", json!({ "id": id, "applicationVersion": "1.28" }), "upgrade"),
        ("scaleDeployment", json!({ "id": id, "component": "web", "replicas": 3 }), "update"),
        ("stopComponents", json!({ "id": id, "components": ["web"] }), "update"),
        ("startComponents", json!({ "id": id, "components": ["web"] }), "update"),
        ("runJob", json!({ "id": id, "action": "dump" }), "update"),
        ("stopDeployment", json!(id), "update"),
        ("startDeployment", json!(id), "update"),
    ];
    for (name, arguments, workflow) in cases {
        let before = newest(&client, &id).await;
        let seen = preview(&client, json!({ name: arguments })).await;
        assert_eq!(newest(&client, &id).await, before, "{name} is only thought of");
        assert_eq!(seen["workflow"], workflow, "{name}: {seen:#}");
        let (declared, given) = match &arguments {
            Value::String(_) => ("$id: ID!".to_owned(), "id: $id".to_owned()),
            _ => {
                let types = |key: &str| match key {
                    "id" => "ID!",
                    "input" => "UpdateDeploymentInput!",
                    "replicas" => "Int!",
                    "components" => "[String!]!",
                    "component" | "action" => "String!",
                    _ => "String",
                };
                let keys: Vec<&String> = arguments.as_object().unwrap().keys().collect();
                let declared: Vec<String> = keys.iter().map(|key| format!("${key}: {}", types(key))).collect();
                let given: Vec<String> = keys.iter().map(|key| format!("{key}: ${key}")).collect();
                (declared.join(", "), given.join(", "))
            }
        };
        let variables = if arguments.is_string() { json!({ "id": id }) } else { arguments };
        let query =
            format!("mutation({declared}) {{ changed: {name}({given}) {{ task {{ workflow steps {{ name }} }} }} }}");
        let task = client.ok(&query, variables).await["changed"]["task"].clone();
        assert_eq!(task["workflow"], workflow, "{name}");
        let steps: Vec<&Value> = task["steps"].as_array().unwrap().iter().map(|step| &step["name"]).collect();
        assert_eq!(json!(steps), seen["steps"], "{name}");
        let query = "query($from: ID!, $to: ID!) { instanceDiff(from: $from, to: $to) { changes { field old new added removed } } }";
        let after = newest(&client, &id).await;
        let diff = client.ok(query, json!({ "from": before["id"], "to": after["id"] })).await;
        let mut previewed = seen["changes"].clone();
        for one in previewed.as_array_mut().unwrap() {
            one.as_object_mut().unwrap().remove("origin");
        }
        let mut real = diff["instanceDiff"]["changes"].clone();
        for one in previewed.as_array_mut().unwrap().iter_mut().chain(real.as_array_mut().unwrap()) {
            // A run has an id of its own each time.
            if one["field"] == "jobs" {
                one["new"] = json!(one["new"].as_array().unwrap().len());
            }
        }
        assert_eq!(previewed, real, "{name}");
    }
    let seen = preview(&client, json!({ "updateDeployment": { "id": id, "input": set("A", "c") } })).await;
    let changed =
        seen["changes"].as_array().unwrap().iter().find(|one| one["field"] == "context.instance.config.env_vars.A");
    assert_eq!(changed.unwrap()["origin"], "DEPLOYMENT", "{seen:#}");
    assert!(seen["document"].as_str().unwrap().contains("+          A: c"), "{}", seen["document"]);
    let nothing = preview(&client, json!({ "updateDeployment": { "id": id, "input": set("A", "b") } })).await;
    assert_eq!((&nothing["workflow"], &nothing["changes"]), (&Value::Null, &json!([])));
    let end = preview(&client, json!({ "deleteDeployment": id })).await;
    assert_eq!(end["workflow"], "delete");
    assert!(end["objects"].as_array().unwrap().iter().all(|one| one["removed"] == true));
    let wrong = json!({ "change": { "scaleDeployment": { "id": id, "component": "web", "replicas": 5000 } } });
    let error = client.execute(PREVIEW, wrong).await.unwrap_err().to_string();
    assert!(error.contains("config.components.web.replicas"), "as the change itself: {error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn components_and_jobs_are_asked_for_by_name_and_once() {
    let Place { server: _server, client, environment, .. } = place().await;
    let made = client
        .create(json!({ "environment": environment, "name": "front", "driver": "jobs", "applicationVersion": "1.27",
            "parameters": { "image": "nginx" } }))
        .await;
    let (id, _) = made.unwrap();
    let replicas = async || newest(&client, &id).await["spec"]["context"]["components"]["web"]["replicas"].clone();
    client.ask(&id, "scaleDeployment(id: $id, component: \"web\", replicas: 3)").await.unwrap().unwrap();
    assert_eq!(replicas().await, 3);
    client.ask(&id, "stopComponents(id: $id, components: [\"web\"])").await.unwrap().unwrap();
    assert_eq!(replicas().await, 0);
    assert_eq!(client.ask(&id, "stopComponents(id: $id, components: [\"web\"])").await.unwrap(), None, "it is stopped");
    client.ask(&id, "startComponents(id: $id, components: [\"web\"])").await.unwrap().unwrap();
    assert_eq!(replicas().await, 3, "what it had is not forgotten");
    client.ask(&id, "stopComponents(id: $id, components: [\"web\"])").await.unwrap().unwrap();
    client.ask(&id, "scaleDeployment(id: $id, component: \"web\", replicas: 2)").await.unwrap().unwrap();
    assert_eq!(replicas().await, 2, "who scales it wants its pods");
    for (mutation, said) in [
        ("stopComponents(id: $id, components: [\"nope\"])", "there is no component \"nope\"; it has web"),
        ("stopComponents(id: $id, components: [])", "components: none is named"),
        ("scaleDeployment(id: $id, component: \"nope\", replicas: 1)", "it has web"),
        ("runJob(id: $id, action: \"nope\")", "driver jobs has no job \"nope\"; it has dump, check"),
        ("rollbackDeployment(id: $id, toInstance: \"nope\")", "instance \"nope\""),
    ] {
        let error = client.ask(&id, mutation).await.unwrap_err().to_string();
        assert!(error.contains(said), "{mutation}: {error}");
    }

    let jobs = async || newest(&client, &id).await["spec"]["jobs"].as_array().cloned().unwrap_or_default();
    let first = client.ask(&id, "runJob(id: $id, action: \"dump\")").await.unwrap().unwrap();
    let second = client.ask(&id, "runJob(id: $id, action: \"dump\")").await.unwrap().unwrap();
    assert_ne!(first, second, "each request is a run of its own");
    let runs = jobs().await;
    assert_eq!(runs.len(), 2, "nothing has run yet: both are asked for");
    assert_ne!(runs[0]["id"], runs[1]["id"]);
    client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    assert_eq!(jobs().await, runs, "another change takes them along");
    let error =
        client.execute("mutation($id: ID!) { retryTask(task: $id) { task { id } } }", json!({ "id": second })).await;
    let error = error.unwrap_err().to_string();
    assert!(error.contains("a newer change of the deployment took its place"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn going_back_brings_everything_back_also_without_the_drivers_folder() {
    let Place { server, client, cluster, environment, .. } = place().await;
    let (id, _) = client
        .create(json!({ "environment": environment, "name": "db", "driver": "postgresql",
            "config": { "env_vars": { "A": "first" } }, "parameters": { "password": "the-first-one", "database": "one" } }))
        .await
        .unwrap();
    server.drained(LIMIT).await;
    let first = newest(&client, &id).await;
    let files = async || {
        let files = git::files(&server.hosted(&cluster)).await;
        let of = |end: &str| {
            let found = files.iter().find(|(path, _)| path.contains(&id) && path.ends_with(end));
            found.map(|(_, text)| text.clone()).unwrap_or_else(|| panic!("no {end}"))
        };
        (of("styrmindeployment.yaml"), of("secrets.sops.yaml"))
    };
    let before = files().await;
    let input = json!({ "config": { "set": { "env_vars": { "B": "second" } }, "remove": ["/env_vars/A"] },
        "parameters": { "password": "the-second-one", "database": "two" } });
    let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
    client.ok(query, json!({ "id": id, "input": input })).await;
    server.drained(LIMIT).await;
    assert_ne!(files().await.1, before.1);

    std::fs::remove_dir_all(server.folder.path().join("drivers/postgresql")).unwrap();
    let back = format!("rollbackDeployment(id: $id, toInstance: \"{}\")", first["id"].as_str().unwrap());
    client.ask(&id, &back).await.unwrap().unwrap();
    server.drained(LIMIT).await;
    let now = newest(&client, &id).await;
    assert_eq!(now["sequence"], 3, "a new instance");
    let content = |instance: &Value| {
        let mut spec = instance["spec"].clone();
        spec.as_object_mut().unwrap().remove("instanceId");
        spec
    };
    assert_eq!(content(&now), content(&first));
    let after = files().await;
    let stable = |text: &str| {
        let own = |line: &&str| !line.contains("instanceId") && !line.contains("instance-sequence");
        text.lines().filter(own).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(stable(&after.0), stable(&before.0));
    let fingerprints = |text: &str| {
        let found = text.lines().filter(|line| line.contains("fingerprint.styrmin.io/"));
        found.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(fingerprints(&after.1), fingerprints(&before.1), "the first password");
    assert_eq!(client.ask(&id, &back).await.unwrap(), None, "it is what is on its way");

    // The next change starts from there.
    client.set_variable(&id, "C", "third").await.unwrap().unwrap();
    let now = newest(&client, &id).await;
    let context = &now["spec"]["context"];
    assert_eq!(context["instance"]["config"]["env_vars"], json!({ "A": "first", "C": "third" }));
    assert_eq!(context["parameters"]["database"], "one");
    assert_eq!(context["parameters"]["password"], first["spec"]["context"]["parameters"]["password"]);
    server.drained(LIMIT).await;
    assert_eq!(files().await.1, after.1, "the same secrets, the same file");
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_that_have_ended_make_room_and_only_failed_ones_are_tried_again() {
    let mut place = place().await;
    let id = place.jobs("front").await;
    place.tell(&id, "Ready", json!({})).await;
    let jobs = async |place: &Place| {
        let jobs = newest(&place.client, &id).await["spec"]["jobs"].clone();
        let ids = jobs.as_array().into_iter().flatten().map(|run| run["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<String>>()
    };
    let mut task = None;
    for _ in 0..50 {
        task = place.client.ask(&id, "runJob(id: $id, action: \"dump\")").await.unwrap();
    }
    let error = place.client.ask(&id, "runJob(id: $id, action: \"dump\")").await.unwrap_err().to_string();
    assert!(error.contains("50 runs wait already"), "{error}");
    // 48 end well, one fails, and so the last one is not run.
    let runs = jobs(&place).await;
    place.tell(&id, "Failed", json!({ "finishedJobs": runs[..49], "failedJobs": [runs[48]] })).await;
    let query = "query($id: ID!) { task(id: $id) { state } }";
    let state = place.client.ok(query, json!({ "id": task })).await["task"]["state"].clone();
    assert_eq!(state, "FAILED");
    let query = "mutation($task: ID!) { retryTask(task: $task) { task { id } } }";
    place.client.ok(query, json!({ "task": task })).await;
    let retried = jobs(&place).await;
    assert_eq!(retried.len(), 2, "what ended well does not run again: {retried:?}");
    assert!(!runs.contains(&retried[0]), "another attempt is another run");
    assert!(!runs.contains(&retried[1]), "so is one that is not known to have ended");
    // One more has room, and a change that is none of a job takes along what has not ended.
    place.client.ask(&id, "runJob(id: $id, action: \"check\")").await.unwrap().unwrap();
    place.tell(&id, "CreatingHelmRelease", json!({ "finishedJobs": retried })).await;
    place.client.set_variable(&id, "A", "b").await.unwrap().unwrap();
    assert_eq!(jobs(&place).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn going_back_and_trying_again_need_nothing_of_what_is_said_today() {
    let mut place = place().await;
    let id = place.jobs("front").await;
    place.client.set_variable(&id, "A", "first").await.unwrap().unwrap();
    let first = newest(&place.client, &id).await;
    let context = first["spec"]["context"].clone();
    place.client.set_variable(&id, "A", "second").await.unwrap().unwrap();
    // From now on no hostname is possible.
    let suffix = vec!["a".repeat(60); 4].join(".");
    let query =
        "mutation($id: ID!, $config: ConfigPatch!) { updateCluster(id: $id, config: $config) { cluster { id } } }";
    let patch = json!({ "set": { "fqdn_suffix": suffix } });
    place.client.ok(query, json!({ "id": place.cluster, "config": patch })).await;
    let error = place.client.set_variable(&id, "A", "third").await.unwrap_err().to_string();
    assert!(error.contains("its hostname is not possible"), "{error}");

    let back = format!("rollbackDeployment(id: $id, toInstance: \"{}\")", first["id"].as_str().unwrap());
    let task = place.client.ask(&id, &back).await.unwrap().unwrap();
    assert_eq!(newest(&place.client, &id).await["spec"]["context"], context);
    place.tell(&id, "Failed", json!({ "message": "no such image" })).await;
    let query = "mutation($task: ID!) { retryTask(task: $task) { task { id } } }";
    place.client.ok(query, json!({ "task": task })).await;
    let now = newest(&place.client, &id).await;
    assert_eq!((&now["spec"]["context"], &now["sequence"]), (&context, &json!(5)), "the same content once more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_cannot_be_used_keeps_nobody_from_leaving_it() {
    let mut place = place().await;
    let (stays, goes) = (place.jobs("stays").await, place.jobs("goes").await);
    place.server.drained(LIMIT).await;
    place.server.kill().await;
    // As a later release, or another one, may have stored it.
    let data = place.server.folder.path().join("data/styrmin.db");
    let pool = sqlx::SqlitePool::connect(&format!("sqlite:{}", data.display())).await.unwrap();
    sqlx::query("UPDATE driver_versions SET files = '{\"driver.styrmin.yml\": \"kind: Other\"}' WHERE name = 'jobs'")
        .execute(&pool)
        .await
        .unwrap();
    pool.close().await;
    let folder = place.server.folder.path().join("drivers/jobs");
    let file = folder.join("driver.styrmin.yml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen("  version: 1.0.0", "  version: 1.1.0", 1)).unwrap();
    place.server.up().await;
    let client = &place.client;
    for error in [
        client.set_variable(&stays, "A", "b").await.unwrap_err(),
        client.ask(&stays, "runJob(id: $id, action: \"dump\")").await.unwrap_err(),
        client.ask(&stays, "scaleDeployment(id: $id, component: \"web\", replicas: 2)").await.unwrap_err(),
    ] {
        assert!(error.to_string().contains("cannot be used by this release; upgrade the deployment"), "{error}");
    }
    let seen = preview(client, json!({ "upgradeDeployment": { "id": stays } })).await;
    assert_eq!(seen["workflow"], "upgrade");
    client.ask(&stays, "upgradeDeployment(id: $id)").await.unwrap().unwrap();
    client.set_variable(&stays, "A", "b").await.unwrap().unwrap();
    assert_eq!(preview(client, json!({ "deleteDeployment": goes })).await["workflow"], "delete");
    client.delete(&goes).await.unwrap().unwrap();
    let again = preview(client, json!({ "deleteDeployment": goes })).await;
    assert_eq!(again["workflow"], Value::Null, "it is being deleted already");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preview_warns_of_what_is_so() {
    let place = place().await;
    let id = place.jobs("front").await;
    let first = newest(&place.client, &id).await["id"].clone();
    let warned = async |change: Value, word: &str| {
        let seen = preview(&place.client, change).await;
        seen["warnings"].as_array().unwrap().iter().any(|one| one.as_str().unwrap().contains(word))
    };
    let set = |value: &str| json!({ "updateDeployment": { "id": id, "input": { "config": { "set": { "env_vars": { "A": value } } } } } });
    assert!(warned(set("a"), "will end superseded").await);
    let nothing = json!({ "updateDeployment": { "id": id, "input": {} } });
    assert!(!warned(nothing, "superseded").await, "nothing takes its place");
    place.client.ask(&id, "stopDeployment(id: $id)").await.unwrap().unwrap();
    assert!(warned(set("a"), "is stopped, and stays so").await);
    let back = json!({ "rollbackDeployment": { "id": id, "toInstance": first } });
    assert!(!warned(back, "stays so").await, "it ran then");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_applies_a_file_and_shows_before_what_it_would_do() {
    let Place { server, client, environment, .. } = place().await;
    let file = server.folder.path().join("front.yaml");
    let path = file.to_str().unwrap().to_owned();
    let write = |more: &str| {
        let text = format!(
            "environment: {environment}\nname: front\ndriver: web-application\napplicationVersion: \"1.27\"\nparameters: {{image: nginx}}\n{more}"
        );
        std::fs::write(&file, text).unwrap();
    };
    write("config: {env_vars: {A: a, B: b}}\n");
    let (done, shown, _) = ctl(&server, &["deployments", "apply", "-f", &path, "--dry-run"]).await;
    assert!(done && shown.starts_with("Workflow: create\n") && shown.contains("+kind: HelmRelease"), "{shown}");
    let (done, said, _) = ctl(&server, &["-o", "json", "deployments", "apply", "-f", &path, "--wait=pushed"]).await;
    assert!(done, "{said}");
    let query = "{ deployments { nodes { id applicationVersion config parameters newestInstance { sequence } } } }";
    let state = async || client.ok(query, json!({})).await["deployments"]["nodes"][0].clone();
    let id = state().await["id"].as_str().unwrap().to_owned();
    assert_eq!(state().await["config"], json!({ "env_vars": { "A": "a", "B": "b" } }));

    // What the file does not set any more is not set; another version comes in the same change.
    write("config: {env_vars: {A: c}}\n");
    let text = std::fs::read_to_string(&file).unwrap().replace("1.27", "1.28");
    std::fs::write(&file, text).unwrap();
    let (done, shown, _) = ctl(&server, &["deployments", "apply", "-f", &path, "--dry-run"]).await;
    assert!(done && shown.starts_with("Workflow: upgrade\n"), "{shown}");
    assert!(shown.contains("context.instance.config.env_vars.B: \"b\" -> -"), "{shown}");
    assert_eq!(state().await["newestInstance"]["sequence"], 1, "only thought of");
    let (done, said, _) = ctl(&server, &["deployments", "apply", "-f", &path]).await;
    assert!(done, "{said}");
    let now = state().await;
    assert_eq!((&now["config"], &now["applicationVersion"]), (&json!({ "env_vars": { "A": "c" } }), &json!("1.28")));
    assert_eq!(now["newestInstance"]["sequence"], 2);
    let (done, said, _) = ctl(&server, &["-o", "json", "deployments", "apply", "-f", &path]).await;
    assert!(done && said.contains("\"task\": null"), "the same file again is nothing: {said}");

    // A pin that the file does not have is none any more; what somebody else set meanwhile is not removed.
    write("config: {env_vars: {A: c}}\ndriverVersion: 1.0.0\n");
    let pin = async || {
        let found = client.ok("{ deployments { nodes { pinnedDriverVersion } } }", json!({})).await;
        found["deployments"]["nodes"][0]["pinnedDriverVersion"].clone()
    };
    assert!(ctl(&server, &["deployments", "apply", "-f", &path]).await.0);
    assert_eq!(pin().await, "1.0.0");
    write("config: {env_vars: {A: c}}\n");
    assert!(ctl(&server, &["deployments", "apply", "-f", &path]).await.0);
    assert_eq!(pin().await, Value::Null);
    let (done, said, _) = ctl(&server, &["deployments", "stop", "--wait=pushed", &id]).await;
    assert!(done, "{said}");
    let (done, said, _) = ctl(&server, &["deployments", "start", &id, "--wait=pushed"]).await;
    assert!(done, "{said}");

    // A change that fails or takes too long ends with an error.
    let (done, _, said) = ctl(&server, &["deployments", "scale", &id, "web", "3", "--wait", "--timeout", "2"]).await;
    assert!(!done && said.contains("wait timeout"), "no agent is there: {said}");
    let update = ["environments", "update", &environment, "--config", "{env_vars: {Z: z}}"];
    let (done, shown, _) = ctl(&server, &[&["-o", "json"], update.as_slice()].concat()).await;
    let updated: Value = serde_json::from_str(&shown).unwrap();
    assert!(done && updated["config"] == json!({ "env_vars": { "Z": "z" } }), "{shown}");
    let fan_out = updated["fanOut"].as_str().unwrap();
    let (done, shown, said) = ctl(&server, &["-o", "json", "fan-outs", "wait", fan_out, "--timeout", "2"]).await;
    assert!(!done && said.contains("wait timeout"), "no agent is there: {said}");
    assert!(said.contains("1 deployments change, 0 have it already; 1 are on their way"), "{said}");
    assert_eq!(serde_json::from_str::<Value>(&shown).unwrap()["changed"], 1);
    let (done, shown, _) = ctl(&server, &["-o", "json", "fan-outs", "get", fan_out]).await;
    assert!(done && shown.contains("\"FINISHED\""), "{shown}");
    write("config: {nope: 1}\n");
    let (done, _, said) = ctl(&server, &["deployments", "apply", "-f", &path, "--dry-run"]).await;
    assert!(!done && said.contains("'nope' is not a setting"), "{said}");
    write("confg: {}\n");
    let (done, _, said) = ctl(&server, &["deployments", "apply", "-f", &path]).await;
    assert!(!done && said.contains("front.yaml") && said.contains("confg"), "{said}");
}
