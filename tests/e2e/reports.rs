//! What agents say, through the API: who may, what is accepted, and what follows from it.

use serde_json::{Value, json};
use std::time::Duration;
use styrmin_client::{Client, ClientError};
use styrmin_tests::agent::Agent;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{git, http};

const LIMIT: Duration = Duration::from_secs(30);
const STEPS: [&str; 4] = [
    "Create network policies and secrets",
    "Install or upgrade the HelmRelease",
    "Create services and middlewares",
    "Wait for the deployment to be ready",
];

fn code(result: Result<Value, ClientError>) -> String {
    match result {
        Err(ClientError::Refused { code: Some(code), .. }) => code,
        other => panic!("not refused: {other:?}"),
    }
}

/// A server with a cluster, an environment and a deployment whose first commit is pushed.
struct World {
    server: Server,
    client: Client,
    agent: Agent,
    cluster: String,
    environment: String,
    deployment: String,
    task: String,
}

impl World {
    async fn start() -> Self {
        let server = Server::start().await;
        let client = server.client();
        let (cluster, token) = client.cluster(json!({ "name": "c" })).await;
        let environment = client.environment(&cluster, "e").await;
        let (deployment, task) = client.web(&environment, "shop").await;
        let agent = Agent::new(&server, &token, "agent-1", 1);
        let world = Self { server, client, agent, cluster, environment, deployment, task };
        world.pushed().await;
        world
    }

    async fn pushed(&self) {
        self.server.drained(LIMIT).await;
    }

    /// State, newest and active instance of the deployment, and its reported status.
    async fn look(&self) -> Value {
        let query = "query($id: ID!) { deployment(id: $id) { state newestInstance { id specDigest state revision } activeInstance { id state } status { phase instanceId deleting updatedAt } pods { nodes { name updatedAt } } } }";
        self.client.ok(query, json!({ "id": self.deployment })).await["deployment"].clone()
    }

    async fn steps(&self, task: &str) -> Value {
        let query = "query($id: ID!) { task(id: $id) { state message steps { name state attempt message startedAt endedAt } } }";
        self.client.ok(query, json!({ "id": task })).await["task"].clone()
    }

    /// The deployment's object as its newest instance is rolled out.
    async fn object(&self, phase: &str, display: &str) -> Value {
        let look = self.look().await;
        json!({
            "deploymentId": self.deployment,
            "uid": "object-1",
            "namespace": format!("styrmin-env-{}", self.environment),
            "name": format!("styrmin-{}", self.deployment),
            "instanceId": look["newestInstance"]["id"],
            "phase": phase,
            "displayState": display,
            "message": Value::Null,
            "specDigest": look["newestInstance"]["specDigest"],
            "observedGeneration": 1,
            "generation": 1,
            "deleting": false,
            "driftCorrections": 0,
            "conditions": [],
            "steps": [],
        })
    }

    /// Reports of an object that changes nothing but what `edit` does.
    async fn tell(&mut self, phase: &str, display: &str, edit: impl FnOnce(&mut Value)) -> Value {
        let mut object = self.object(phase, display).await;
        edit(&mut object);
        self.agent.deployments(&[object]).await
    }
}

fn pod(name: &str, deployment: Option<&str>, reason: Option<&str>) -> Value {
    json!({
        "namespace": "styrmin-x",
        "name": name,
        "deploymentId": deployment,
        "phase": "Pending",
        "ready": false,
        "restarts": 0,
        "containers": [{
            "name": "web",
            "image": "nginx:no",
            "ready": false,
            "restarts": 0,
            "state": if reason.is_some() { "waiting" } else { "running" },
            "reason": reason,
            "message": reason.map(|_| "no such image"),
        }],
        "startedAt": 1_000,
    })
}

fn states(task: &Value) -> Vec<(&str, &str)> {
    let steps = task["steps"].as_array().unwrap().iter();
    steps.map(|step| (step["name"].as_str().unwrap(), step["state"].as_str().unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_agent_of_the_cluster_itself_reports() {
    let mut world = World::start().await;
    // A person does not.
    let mut person = Agent::new(&world.server, &world.server.token(), "ann", 1);
    for kind in ["pods", "deployments", "flux"] {
        let refused = person.report(kind, json!([])).await;
        assert!(format!("{refused:?}").contains("use the token of the cluster's agent"), "{refused:?}");
        assert_eq!(code(refused), "FORBIDDEN");
    }
    // Another cluster's agent changes nothing of this one; the rest of its report counts.
    let (other, token) = world.client.cluster(json!({ "name": "other" })).await;
    let mut foreign = Agent::new(&world.server, &token, "agent-1", 1);
    let object = world.object("Ready", "Running").await;
    foreign.deployments(std::slice::from_ref(&object)).await;
    let pods = json!([pod("foreign", Some(&world.deployment), None), pod("own", None, None)]);
    foreign.report("pods", pods).await.unwrap();
    let look = world.look().await;
    assert_eq!((&look["state"], &look["status"]), (&json!("DEPLOYING"), &Value::Null));
    assert_eq!(look["pods"]["nodes"], json!([]));
    let query = "query($id: ID!) { podStatuses(clusterId: $id) { nodes { name startedAt containers { image } } } }";
    let pods = world.client.ok(query, json!({ "id": other })).await["podStatuses"]["nodes"].clone();
    assert_eq!(
        pods,
        json!([{ "name": "own", "startedAt": "1970-01-01T00:00:01Z", "containers": [{ "image": "nginx:no" }] }])
    );
    // Neither does a copy of the object at another place in the right cluster.
    let mut copy = object;
    copy["namespace"] = json!("elsewhere");
    world.agent.deployments(&[copy]).await;
    assert_eq!(world.look().await["state"], "DEPLOYING");
    assert_eq!(world.server.metric("styrmin_report_ignored_total").await, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_bound_to_the_first_cluster_that_uses_it() {
    let mut world = World::start().await;
    world.tell("CreatingHelmRelease", "Progressing", |_| {}).await;
    let before = world.look().await;
    world.agent.uid = "uid-2".into();
    let refused = world.agent.report("deployments", json!([])).await;
    assert!(format!("{refused:?}").contains("this token belongs to the cluster with UID uid-1"), "{refused:?}");
    assert_eq!(code(refused), "FOREIGN_CLUSTER");
    assert_eq!(world.look().await, before);
    let query = "query($id: ID!) { cluster(id: $id) { agent { identity epoch sequence clusterUid } } }";
    let agent = world.client.ok(query, json!({ "id": world.cluster })).await["cluster"]["agent"].clone();
    assert_eq!(agent, json!({ "identity": "agent-1", "epoch": 1, "sequence": 1, "clusterUid": "uid-1" }));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_agents_one_loses_and_nothing_flaps() {
    let mut world = World::start().await;
    let token_client = world.agent.client.clone();
    let second = |identity: &str, epoch, sequence| Agent {
        client: token_client.clone(),
        identity: identity.into(),
        epoch,
        sequence,
        uid: "uid-1".into(),
    };
    let object = world.object("CreatingHelmRelease", "Progressing").await;
    world.agent.sequence = 5;
    world.agent.deployments(std::slice::from_ref(&object)).await;
    let before = world.look().await;
    // Lower sequence, the same again, another process of the same epoch, an older epoch.
    for (identity, epoch, sequence) in [("agent-1", 1, 2), ("agent-1", 1, 5), ("agent-2", 1, 99), ("agent-2", 0, 99)] {
        let mut other = second(identity, epoch, sequence);
        for kind in ["deployments", "pods", "flux"] {
            assert_eq!(code(other.report(kind, json!([])).await), "STALE_REPORT", "{identity} {epoch} {sequence}");
            other.sequence -= 1;
        }
    }
    assert_eq!(world.look().await, before);
    // The lease goes over: the new one is heard, the old one no more.
    let mut other = second("agent-2", 2, 0);
    other.deployments(&[object]).await;
    world.agent.sequence = 1_000;
    assert_eq!(code(world.agent.report("deployments", json!([])).await), "STALE_REPORT");
    assert_eq!(world.look().await["status"], before["status"]);
    // Both at once: each report that was accepted was a later one, so the old agent's never was.
    let old = tokio::spawn({
        let mut old = second("agent-1", 1, 2_000);
        async move {
            for _ in 0..20 {
                assert_eq!(code(old.report("pods", json!([])).await), "STALE_REPORT");
            }
        }
    });
    for _ in 0..20 {
        other.report("pods", json!([pod("p", None, None)])).await.unwrap();
    }
    old.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_runs_when_the_cluster_says_so_for_exactly_its_content() {
    let mut world = World::start().await;
    let task = world.task.clone();
    // Why it waits, from Flux.
    let revision = world.look().await["newestInstance"]["revision"].as_str().unwrap().to_owned();
    let old = "a".repeat(40);
    let flux = json!([{ "kind": "GitRepository", "namespace": "flux-system", "name": "styrmin", "ready": "True", "revision": format!("main@sha1:{old}"), "suspended": false }]);
    let answer = world.agent.report("flux", flux).await.unwrap();
    assert_eq!(answer["newestRevision"], json!(revision));
    let steps = world.steps(&task).await;
    assert_eq!(
        steps["steps"][1]["message"],
        json!(format!("Flux has main@sha1:aaaaaaaaaa (this commit: {})", &revision[..10]))
    );
    // The previous rollout's Ready says nothing about this one.
    world.tell("Ready", "Running", |object| object["instanceId"] = json!("another")).await;
    assert_eq!(states(&world.steps(&task).await)[1].1, "RUNNING");

    for (phase, expected) in [
        ("CreatingPrerequisites", ["RUNNING", "PENDING", "PENDING", "PENDING"]),
        ("CreatingHelmRelease", ["SUCCEEDED", "RUNNING", "PENDING", "PENDING"]),
        ("CreatingServices", ["SUCCEEDED", "SUCCEEDED", "RUNNING", "PENDING"]),
    ] {
        world.tell(phase, "Progressing", |_| {}).await;
        let found = world.steps(&task).await;
        let found: Vec<_> = states(&found).into_iter().skip(2).map(|(_, state)| state.to_owned()).collect();
        assert_eq!(found, expected, "{phase}");
        assert_eq!(world.look().await["state"], "DEPLOYING");
    }
    // The operator's steps take the place of the predicted ones.
    let step = |name: &str, state: &str| json!({ "name": name, "state": state, "attempt": 1, "startedAt": "2026-01-01T00:00:00Z" });
    let steps = json!([step(STEPS[0], "Succeeded"), step("Run migrate", "Running")]);
    world.tell("CreatingServices", "Progressing", |object| object["steps"] = steps).await;
    let found = world.steps(&task).await;
    assert_eq!(states(&found)[2..], [(STEPS[0], "SUCCEEDED"), ("Run migrate", "RUNNING")]);
    assert_eq!(found["steps"][3]["startedAt"], "2026-01-01T00:00:00Z");

    // Somebody edited the object: it is ready, but not with what the instance says.
    world.tell("Ready", "Running", |object| object["specDigest"] = json!("sha256:other")).await;
    let found = world.steps(&task).await;
    assert_eq!((&found["state"], &world.look().await["state"]), (&json!("RUNNING"), &json!("DEPLOYING")));
    assert!(found["message"].as_str().unwrap().contains("sha256:other"), "{found}");

    world.tell("Ready", "Running", |_| {}).await;
    let (found, look) = (world.steps(&task).await, world.look().await);
    assert_eq!((&found["state"], &found["message"]), (&json!("SUCCEEDED"), &Value::Null));
    assert!(states(&found).iter().all(|(_, state)| *state == "SUCCEEDED"), "{found}");
    assert_eq!(look["state"], "RUNNING");
    assert_eq!(look["activeInstance"], json!({ "id": look["newestInstance"]["id"], "state": "ACTIVE" }));

    // The next change retires it.
    let first = look["newestInstance"]["id"].clone();
    let next = world.client.set_variable(&world.deployment, "A", "1").await.unwrap().unwrap();
    world.pushed().await;
    assert_eq!(world.look().await["state"], "DEPLOYING");
    world.tell("Ready", "Running", |_| {}).await;
    assert_eq!(world.steps(&next).await["state"], "SUCCEEDED");
    assert_eq!(world.look().await["state"], "RUNNING");
    let query = "query($id: ID!) { instance(id: $id) { state } }";
    assert_eq!(world.client.ok(query, json!({ "id": first })).await["instance"]["state"], "RETIRED");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_names_its_pods_and_the_next_good_change_recovers() {
    let mut world = World::start().await;
    world.tell("CreatingHelmRelease", "Progressing", |_| {}).await;
    let pods = json!([
        pod("shop-1", Some(&world.deployment), Some("ImagePullBackOff")),
        pod("shop-2", Some(&world.deployment), None)
    ]);
    world.agent.report("pods", pods).await.unwrap();
    // An error that may pass: the step fails, the task goes on.
    world.tell("CreatingHelmRelease", "Error", |object| object["message"] = json!("too slow")).await;
    let found = world.steps(&world.task).await;
    assert_eq!((&found["state"], &found["steps"][3]["state"]), (&json!("RUNNING"), &json!("FAILED")));
    assert_eq!(found["steps"][3]["message"], "too slow; pod shop-1: container web: ImagePullBackOff (no such image)");
    world.tell("CreatingHelmRelease", "Progressing", |_| {}).await;
    let found = world.steps(&world.task).await;
    assert_eq!((&found["steps"][3]["state"], &found["steps"][3]["attempt"]), (&json!("RUNNING"), &json!(2)));
    // The end of it.
    world.tell("Failed", "Error", |object| object["message"] = json!("no more retries")).await;
    let (found, look) = (world.steps(&world.task).await, world.look().await);
    assert_eq!((&found["state"], &look["state"]), (&json!("FAILED"), &json!("FAILED")));
    assert_eq!((&look["newestInstance"]["state"], &look["activeInstance"]), (&json!("FAILED"), &Value::Null));
    let message = found["message"].as_str().unwrap();
    assert!(message.contains("no more retries") && message.contains("pod shop-1"), "{message}");
    // Ready after all: a task that failed is revived by a new instance only.
    world.tell("Ready", "Running", |_| {}).await;
    assert_eq!(world.look().await["state"], "FAILED");

    let next = world.client.set_variable(&world.deployment, "A", "1").await.unwrap().unwrap();
    world.pushed().await;
    world.tell("Ready", "Running", |_| {}).await;
    let look = world.look().await;
    assert_eq!((&look["state"], &world.steps(&next).await["state"]), (&json!("RUNNING"), &json!("SUCCEEDED")));
    assert_eq!(world.steps(&world.task).await, found, "the earlier task keeps its failure");
    // What runs may fail later, and run again.
    world.tell("Failed", "Error", |_| {}).await;
    assert_eq!(world.look().await["state"], "FAILED");
    world.tell("Ready", "Running", |_| {}).await;
    assert_eq!(world.look().await["state"], "RUNNING");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deletion_ends_when_the_object_is_gone_and_no_deletion_happens_by_a_slip() {
    let mut world = World::start().await;
    world.tell("Ready", "Running", |_| {}).await;
    // Somebody removed the folder: the object is being deleted, nobody asked for it.
    let slip = world.tell("Deleting", "Deleting", |object| {
        object["deleting"] = json!(true);
        object["message"] = json!("NotConfirmed");
    });
    assert_eq!(slip.await["confirmedDeletions"], json!([]));
    let look = world.look().await;
    assert_eq!((&look["state"], &look["status"]["phase"]), (&json!("RUNNING"), &json!("Deleting")));
    // It is even gone: people see that it is missing.
    world.agent.deployments(&[]).await;
    let look = world.look().await;
    assert_eq!((&look["state"], &look["status"]), (&json!("RUNNING"), &Value::Null));

    // Now by wish.
    let task = world.client.delete(&world.deployment).await.unwrap().unwrap();
    let object = world.object("Deleting", "Deleting").await;
    world.pushed().await;
    let deleting = |message: &str| {
        let mut object = object.clone();
        (object["deleting"], object["message"]) = (json!(true), json!(message));
        object
    };
    let answer = world.agent.deployments(&[deleting("uninstalling")]).await;
    assert_eq!(answer["confirmedDeletions"], json!([{ "deploymentId": world.deployment, "uid": "object-1" }]));
    let found = world.steps(&task).await;
    let last = found["steps"].as_array().unwrap().last().unwrap();
    assert_eq!(last["name"], "Remove the deployment's resources and namespace");
    assert_eq!((&last["state"], &last["message"]), (&json!("RUNNING"), &json!("uninstalling")));
    assert_eq!(world.look().await["state"], "DELETING");
    // A report never takes it back.
    let mut ready = object.clone();
    (ready["phase"], ready["displayState"]) = (json!("Ready"), json!("Running"));
    world.agent.deployments(&[ready]).await;
    assert_eq!(world.look().await["state"], "DELETING");
    // The answer to any report confirms.
    world.agent.deployments(&[deleting("uninstalling")]).await;
    let answer = world.agent.report("pods", json!([])).await.unwrap();
    assert_eq!(answer["confirmedDeletions"].as_array().unwrap().len(), 1);
    let answer = world.agent.deployments(&[]).await;
    assert_eq!(answer["confirmedDeletions"], json!([]));
    let (found, look) = (world.steps(&task).await, world.look().await);
    assert_eq!((&found["state"], &look["state"]), (&json!("SUCCEEDED"), &json!("DELETED")));
    assert_eq!(look["activeInstance"], Value::Null);
    assert!(states(&found).iter().all(|(_, state)| *state == "SUCCEEDED"), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unchanged_report_costs_no_rows_and_what_vanished_is_gone() {
    let mut world = World::start().await;
    world.tell("CreatingHelmRelease", "Progressing", |_| {}).await;
    let all: Vec<Value> = (0..300).map(|number| pod(&format!("p{number}"), Some(&world.deployment), None)).collect();
    world.agent.report("pods", json!(all)).await.unwrap();
    let (rows, look, steps) =
        (world.server.metric("styrmin_report_rows_total").await, world.look().await, world.steps(&world.task).await);
    assert_eq!(rows, 301);
    tokio::time::sleep(Duration::from_millis(20)).await;
    // In another order it is the same snapshot.
    let turned: Vec<Value> = all.iter().rev().cloned().collect();
    world.agent.report("pods", json!(turned)).await.unwrap();
    world.tell("CreatingHelmRelease", "Progressing", |_| {}).await;
    assert_eq!(world.server.metric("styrmin_report_rows_total").await, rows);
    assert_eq!((world.look().await, world.steps(&world.task).await), (look, steps));
    // One pod more and one less: two rows.
    let mut changed = all[1..].to_vec();
    changed.push(pod("new", Some(&world.deployment), None));
    world.agent.report("pods", json!(changed)).await.unwrap();
    assert_eq!(world.server.metric("styrmin_report_rows_total").await, rows + 2);
    let query = "query($id: ID!, $after: String) { podStatuses(deploymentId: $id, first: 200, after: $after) { nodes { name } pageInfo { hasNextPage endCursor } } }";
    let (mut names, mut after) = (Vec::new(), Value::Null);
    loop {
        let page =
            world.client.ok(query, json!({ "id": world.deployment, "after": after })).await["podStatuses"].clone();
        names.extend(page["nodes"].as_array().unwrap().iter().map(|node| node["name"].as_str().unwrap().to_owned()));
        if page["pageInfo"]["hasNextPage"] == false {
            break;
        }
        after = page["pageInfo"]["endCursor"].clone();
    }
    assert_eq!(names.len(), 300);
    assert!(!names.contains(&"p0".to_owned()) && names.contains(&"new".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_said_before_a_push_was_recorded_counts_after_it() {
    let mut world = World::start().await;
    world.tell("Ready", "Running", |_| {}).await;
    assert_eq!(world.look().await["state"], "RUNNING");
    // The push takes long: the cluster has the next instance before the server has recorded it.
    let repository = world.server.hosted(&world.cluster);
    git::hook(&repository, "pre-receive", "sleep 2");
    let next = world.client.set_variable(&world.deployment, "A", "1").await.unwrap().unwrap();
    let object = world.object("Ready", "Running").await;
    world.agent.deployments(std::slice::from_ref(&object)).await;
    assert_eq!(world.client.task(&next).await.unwrap().state, "RUNNING");
    world.pushed().await;
    // The agent does not repeat it, but reports on Flux.
    world.agent.report("flux", json!([])).await.unwrap();
    let look = world.look().await;
    assert_eq!((&world.steps(&next).await["state"], &look["state"]), (&json!("SUCCEEDED"), &json!("RUNNING")));
    // A deletion is different: what was absent before it was pushed may still have come, and a
    // snapshot that arrives right after the push may have been made before it.
    let deletion = world.client.delete(&world.deployment).await.unwrap().unwrap();
    world.agent.deployments(&[]).await;
    world.pushed().await;
    world.agent.report("flux", json!([])).await.unwrap();
    assert_eq!(world.look().await["state"], "DELETING");
    world.agent.deployments(&[object]).await;
    world.agent.deployments(&[]).await;
    let (task, look) = (world.steps(&deletion).await, world.look().await);
    assert_eq!((&task["state"], &look["state"]), (&json!("SUCCEEDED"), &json!("DELETED")), "it was seen to vanish");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_may_be_what_differs_or_that_nothing_does() {
    let mut world = World::start().await;
    let id = world.deployment.clone();
    let pods = async |world: &World| {
        let query =
            "query($id: ID!) { podStatuses(deploymentId: $id) { nodes { name containers { reason } updatedAt } } }";
        world.client.ok(query, json!({ "id": world.deployment })).await["podStatuses"]["nodes"].clone()
    };
    let names = |pods: &Value| {
        let names = pods.as_array().unwrap().iter().map(|pod| pod["name"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    let three = ["a", "b", "c"].map(|name| pod(name, Some(&id), None));
    // Before the first whole snapshots nothing can differ from them.
    let delta = |base: &str, removed: &[&str]| {
        let removed: Vec<Value> =
            removed.iter().map(|name| json!({ "kind": "Pod", "namespace": "styrmin-x", "name": name })).collect();
        Some(json!({ "base": base, "removed": removed }))
    };
    assert_eq!(code(world.agent.say("pods", json!(three), Some("p1"), delta("p0", &[])).await), "WHOLE_NEEDED");
    assert_eq!(code(world.agent.unchanged(["p0", "d0", "f0"]).await), "WHOLE_NEEDED");
    world.agent.say("pods", json!(three), Some("p1"), None).await.unwrap();
    assert_eq!(code(world.agent.unchanged(["p1", "d1", "f1"]).await), "WHOLE_NEEDED", "two kinds are missing");
    let object = world.object("CreatingHelmRelease", "Progressing").await;
    world.agent.say("deployments", json!([object]), Some("d1"), None).await.unwrap();
    world.agent.say("flux", json!([]), Some("f1"), None).await.unwrap();
    world.agent.unchanged(["p1", "d1", "f1"]).await.unwrap();

    // What differs: one pod, and one is gone.
    let before = pods(&world).await;
    let rows = world.server.metric("styrmin_report_rows_total").await;
    let changed = json!([pod("b", Some(&id), Some("ImagePullBackOff"))]);
    world.agent.say("pods", changed.clone(), Some("p2"), delta("p1", &["c"])).await.unwrap();
    let after = pods(&world).await;
    assert_eq!((names(&after), &after[0]), (vec!["a".to_owned(), "b".to_owned()], &before[0]));
    assert_eq!(after[1]["containers"][0]["reason"], "ImagePullBackOff");
    assert_eq!(world.server.metric("styrmin_report_rows_total").await, rows + 2);

    // Repeated, late, reordered, or from somebody else: nothing changes, and the whole is asked for.
    for (digest, base) in [("p2", "p1"), ("p3", "p0"), ("p3", "")] {
        let said = world.agent.say("pods", json!([]), Some(digest), delta(base, &["a", "b"])).await;
        assert_eq!(code(said), "WHOLE_NEEDED", "{digest} {base}");
    }
    for digests in [["p1", "d1", "f1"], ["p2", "d1", "f2"], ["", "", ""]] {
        assert_eq!(code(world.agent.unchanged(digests).await), "WHOLE_NEEDED", "{digests:?}");
    }
    world.agent.identity = "agent-2".into();
    assert_eq!(code(world.agent.unchanged(["p2", "d1", "f1"]).await), "WHOLE_NEEDED", "another process");
    world.agent.identity = "agent-1".into();
    world.agent.unchanged(["p2", "d1", "f1"]).await.unwrap();
    world.agent.sequence -= 1;
    assert_eq!(code(world.agent.unchanged(["p2", "d1", "f1"]).await), "STALE_REPORT", "the same once more");
    assert_eq!(pods(&world).await, after);
    assert_eq!(code(world.agent.say("pods", json!([]), None, delta("p2", &[])).await), "INVALID", "no digest");
    // An object that is not this cluster's is left out of what differs, too.
    let foreign = json!([pod("z", Some("zzzzzzzzzzzz"), None)]);
    world.agent.say("pods", foreign, Some("p3"), delta("p2", &[])).await.unwrap();
    assert_eq!(pods(&world).await, after);

    // Another process begins with the whole.
    world.agent.epoch += 1;
    world.agent.say("pods", json!(three), Some("p9"), None).await.unwrap();
    assert_eq!(names(&pods(&world).await), ["a", "b", "c"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_move_by_what_differs_and_by_the_word_that_nothing_does() {
    let mut world = World::start().await;
    world.agent.say("pods", json!([]), Some("p"), None).await.unwrap();
    world.agent.say("flux", json!([]), Some("f"), None).await.unwrap();
    let object = world.object("CreatingHelmRelease", "Progressing").await;
    world.agent.say("deployments", json!([object]), Some("d1"), None).await.unwrap();
    let ready = world.object("Ready", "Running").await;
    let delta = |base: &str, removed: Value| Some(json!({ "base": base, "removed": removed }));
    world.agent.say("deployments", json!([ready]), Some("d2"), delta("d1", json!([]))).await.unwrap();
    assert_eq!(world.look().await["state"], "RUNNING");

    // The cluster has the next instance before the server has recorded its push: nothing differs any more then.
    let repository = world.server.hosted(&world.cluster);
    git::hook(&repository, "pre-receive", "sleep 2");
    let next = world.client.set_variable(&world.deployment, "A", "1").await.unwrap().unwrap();
    let object = world.object("Ready", "Running").await;
    world.agent.say("deployments", json!([object]), Some("d3"), delta("d2", json!([]))).await.unwrap();
    assert_eq!(world.client.task(&next).await.unwrap().state, "RUNNING");
    world.pushed().await;
    world.agent.unchanged(["p", "d3", "f"]).await.unwrap();
    assert_eq!(
        (&world.steps(&next).await["state"], &world.look().await["state"]),
        (&json!("SUCCEEDED"), &json!("RUNNING"))
    );
    std::fs::remove_file(repository.join("hooks/pre-receive")).unwrap();

    // A change of another object leaves this one what it is; its own absence ends its deletion.
    let (other, task) = world.client.web(&world.environment, "other").await;
    let deletion = world.client.delete(&world.deployment).await.unwrap().unwrap();
    world.pushed().await;
    let mut second = object.clone();
    second["deploymentId"] = json!(other);
    second["name"] = json!(format!("styrmin-{other}"));
    second["phase"] = json!("CreatingPrerequisites");
    world.agent.say("deployments", json!([second]), Some("d4"), delta("d3", json!([]))).await.unwrap();
    assert_eq!(world.steps(&deletion).await["state"], "RUNNING");
    let key = json!([{ "kind": "StyrminDeployment", "namespace": object["namespace"], "name": object["name"] }]);
    world.agent.say("deployments", json!([]), Some("d5"), delta("d4", key)).await.unwrap();
    assert_eq!(
        (&world.steps(&deletion).await["state"], &world.look().await["state"]),
        (&json!("SUCCEEDED"), &json!("DELETED"))
    );
    assert_eq!(world.client.task(&task).await.unwrap().state, "RUNNING");

    // One that never came: absent for long enough after its removal was pushed.
    let (never, _) = world.client.web(&world.environment, "never").await;
    world.pushed().await;
    let deletion = world.client.delete(&never).await.unwrap().unwrap();
    world.pushed().await;
    world.agent.unchanged(["p", "d5", "f"]).await.unwrap();
    assert_eq!(world.client.task(&deletion).await.unwrap().state, "RUNNING", "it may still come");
    tokio::time::sleep(Duration::from_secs(11)).await;
    world.agent.unchanged(["p", "d5", "f"]).await.unwrap();
    assert_eq!(world.client.task(&deletion).await.unwrap().state, "SUCCEEDED");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agents_snapshot_may_be_large_and_others_requests_may_not() {
    let mut world = World::start().await;
    // About 12 MB.
    let all: Vec<Value> = (0..30_000)
        .map(|number| {
            let mut pod = pod(&format!("p{number}"), None, None);
            pod["message"] = json!("x".repeat(100));
            pod
        })
        .collect();
    world.agent.report("pods", json!(all)).await.unwrap();
    assert_eq!(world.server.metric("styrmin_report_rows_total").await, 30_000);
    let large = json!({ "query": "{ viewer { kind } }", "variables": { "x": "x".repeat(5 << 20) } });
    let url = format!("{}/graphql", world.server.address());
    match http().post(url).bearer_auth(world.server.token()).json(&large).send().await {
        Ok(answer) => assert_eq!(answer.status(), 413),
        // The server may close the connection before everything was sent.
        Err(error) => assert!(error.is_request() || error.is_body(), "{error:?}"),
    }
    let many = vec![pod("p", None, None); 40_001];
    assert_eq!(code(world.agent.report("pods", json!(many)).await), "INVALID");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_flux_that_fails_names_what_it_holds_up() {
    let mut world = World::start().await;
    let flux = |kind: &str, name: &str, ready: &str, suspended: bool| {
        json!({ "kind": kind, "namespace": "flux-system", "name": name, "ready": ready, "suspended": suspended,
            "message": "field.yaml: not a mapping", "revision": "main@sha1:0" })
    };
    let shard = format!("styrmin-{}-s0", world.environment);
    let held = async |world: &World| {
        let query = "query($id: ID!) { fluxStatuses(clusterId: $id) { nodes { name heldUp { id } } } }";
        let found = world.client.ok(query, json!({ "id": world.cluster })).await["fluxStatuses"]["nodes"].clone();
        let of =
            |one: &Value| one["heldUp"].as_array().unwrap().iter().map(|held| held["id"].clone()).collect::<Vec<_>>();
        found.as_array().unwrap().iter().map(|one| (one["name"].clone(), of(one))).collect::<Vec<_>>()
    };
    let mine = vec![json!(world.deployment)];
    let objects = [
        flux("GitRepository", "styrmin", "True", false),
        flux("Kustomization", &shard, "False", false),
        flux("Kustomization", "zzz-other-s0", "False", false),
    ];
    world.agent.report("flux", json!(objects)).await.unwrap();
    let none = Vec::<Value>::new();
    let found = held(&world).await;
    assert_eq!(
        found,
        [(json!("styrmin"), none.clone()), (json!(shard), mine.clone()), (json!("zzz-other-s0"), none.clone())]
    );
    let steps = world.steps(&world.task).await;
    assert!(steps["steps"][1]["message"].as_str().unwrap().starts_with("Flux has main@sha1:0"), "{steps:#}");
    // The source holds up everything; what Flux has applied waits no more.
    world.agent.report("flux", json!([flux("GitRepository", "styrmin", "True", true)])).await.unwrap();
    assert_eq!(held(&world).await, [(json!("styrmin"), mine)]);
    let steps = world.steps(&world.task).await;
    assert_eq!(steps["steps"][1]["message"], "GitRepository flux-system/styrmin: is suspended; resume it");
    world.tell("CreatingPrerequisites", "Progressing", |_| {}).await;
    assert_eq!(held(&world).await, [(json!("styrmin"), none)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_hears_of_a_commit_when_it_is_pushed() {
    let world = World::start().await;
    let ask = async |client: &Client, after: Option<&str>| {
        let data = client.execute("query($a: String) { newestRevision(after: $a) }", json!({ "a": after })).await;
        data.map(|data| data["newestRevision"].as_str().map(str::to_owned))
    };
    let agent = world.agent.client.clone();
    // What it does not know comes at once.
    let known = ask(&agent, None).await.unwrap().unwrap();
    assert_eq!(ask(&agent, Some("another")).await.unwrap().as_ref(), Some(&known));
    // Then only the next push ends the question, and no push to the repository of another cluster.
    let waiting = tokio::spawn({
        let known = known.clone();
        async move { ask(&agent, Some(&known)).await.unwrap().unwrap() }
    });
    let (other, _) = world.client.cluster(json!({ "name": "other" })).await;
    world.client.environment(&other, "e").await;
    world.pushed().await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!waiting.is_finished(), "nothing was pushed for this cluster");
    world.client.environment(&world.cluster, "more").await;
    let next = tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("a push ends the question");
    let next = next.unwrap();
    assert_ne!(next, known);
    assert_eq!(world.agent.client.ok("{ newestRevision }", json!({})).await["newestRevision"], next);
    // People have no business here.
    assert_eq!(code(world.client.execute("{ newestRevision }", json!({})).await), "FORBIDDEN");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_lets_nobody_wait() {
    let world = World::start().await;
    let agent = world.agent.client.clone();
    let known = agent.ok("{ newestRevision }", json!({})).await["newestRevision"].clone();
    let waiting = tokio::spawn(async move {
        agent.execute("query($a: String) { newestRevision(after: $a) }", json!({ "a": known })).await
    });
    tokio::time::sleep(Duration::from_millis(500)).await;
    let World { mut server, .. } = world;
    let process = rustix::process::Pid::from_raw(server.process()).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::TERM).unwrap();
    tokio::time::timeout(Duration::from_secs(10), server.ended()).await.expect("it stops although somebody waits");
    tokio::time::timeout(Duration::from_secs(5), waiting).await.expect("the question ends").unwrap().unwrap();
}
