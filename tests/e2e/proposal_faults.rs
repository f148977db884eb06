//! Reviews when something goes wrong: a forge with whims, a branch that is gone, kills, no forge at all.

use serde_json::{Value, json};
use std::time::Duration;
use styrmin_server::faults;
use styrmin_tests::gitea::ADMIN;
use styrmin_tests::people::Person;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::reviews::{ForgeGate, LIMIT, REPOSITORY, Reviewed, SECRET, Scene, Whim, quick};
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git, http};

fn rules() -> Value {
    json!({ "mode": "PULL_REQUEST" })
}

/// A scene whose forge is asked through a gate.
async fn gated(rules: Value) -> (Scene, ForgeGate) {
    let forge = Reviewed::start().await;
    let gate = ForgeGate::before(&forge).await;
    let mut git = forge.git();
    git["forge"]["url"] = gate.url().into();
    (Scene::of(forge, git, rules).await, gate)
}

fn says(text: &'static str) -> impl Fn(&Value) -> bool {
    move |found| found["message"].as_str().is_some_and(|said| said.contains(text))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forge_that_wants_fewer_calls_gets_none_and_opens_one_request() {
    let (scene, gate) = gated(rules()).await;
    let id = scene.direct("front").await;
    let wait = vec![("retry-after", "4".to_owned())];
    let limit = json!({ "message": "You have exceeded a secondary rate limit" });
    gate.next("POST", "/pulls", Whim::Refuse(403, wait, limit));
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    scene.until("it says why it waits", &proposal, says("wants no calls for 4 s")).await;
    let seen = scene.task(&task).await;
    assert!(seen["steps"][0]["message"].as_str().unwrap().contains("secondary rate limit"), "{seen}");
    scene.number(&proposal).await;
    let calls = gate.calls();
    let refused = calls.iter().find(|((method, path), _)| method == "POST" && path.ends_with("/pulls")).unwrap().1;
    let next = calls.iter().find(|(_, at)| *at > refused).unwrap().1;
    assert!(next - refused >= Duration::from_millis(3900), "asked again after {:?}", next - refused);
    assert_eq!(scene.forge.pulls().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_lost_leads_to_no_second_request() {
    let (scene, gate) = gated(rules()).await;
    let id = scene.direct("front").await;
    gate.next("POST", "/pulls", Whim::Lose);
    let (_, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    assert_eq!((gate.left(), scene.forge.pulls().await.len()), (0, 1));
    // No merge is missed.
    gate.next("GET", &*Box::leak(format!("/pulls/{number}").into_boxed_str()), Whim::Lose);
    scene.forge.merge(number, "merge").await;
    scene.until_state(&proposal, "MERGED").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_that_is_refused_is_tried_again() {
    let rules = json!({ "mode": "PULL_REQUEST", "autoMerge": true, "approvals": 0 });
    let (scene, gate) = gated(rules).await;
    let id = scene.direct("front").await;
    gate.next("POST", "/merge", Whim::Refuse(405, Vec::new(), json!({ "message": "Base branch was modified" })));
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(gate.left(), 0);
    let merges = gate.calls().iter().filter(|((_, path), _)| path.ends_with("/merge")).count();
    assert!(merges >= 2, "{merges}");

    // The branch's own rules: the forge counts approvals of its own.
    let protect = json!({ "branch_name": "main", "rule_name": "main", "enable_push": true, "required_approvals": 1 });
    scene.forge.api("POST", "/branch_protections", &protect).await;
    let (_, proposal) = scene.set(&id, "SIZE", "large").await;
    let number = scene.number(&proposal).await;
    let refused = |found: &Value| found["message"].as_str().is_some_and(|said| said.contains("approval"));
    scene.until("it says what the branch wants", &proposal, refused).await;
    scene.forge.approve(number).await;
    scene.until_state(&proposal, "MERGED").await;
    let _ = task;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_is_deleted_ends_its_proposal() {
    let (scene, gate) = gated(rules()).await;
    let id = scene.direct("front").await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let branch = scene.proposal(&proposal).await["headBranch"].as_str().unwrap().to_owned();
    // This forge closes such a request a little later, others leave it open.
    let open = scene.forge.pull("it is open", number, |pull| pull["state"] == "open").await;
    for _ in 0..30 {
        let path = &*Box::leak(format!("/pulls/{number}").into_boxed_str());
        gate.next("GET", path, Whim::Refuse(200, Vec::new(), open.clone()));
    }
    scene.forge.as_rita("DELETE", &format!("/branches/{branch}"), &json!(null)).await.unwrap();
    let closed = scene.until_state(&proposal, "CLOSED").await;
    assert_eq!(closed["message"], "its branch was deleted without a merge");
    let ended = scene.task(&task).await;
    assert_eq!(ended["state"], "REJECTED", "{ended}");
    scene.forge.pull("it is closed", number, |pull| pull["state"] == "closed").await;
    assert_eq!(scene.deployment(&id).await["config"], json!({}));
    assert_eq!(scene.forge.pulls().await.len(), 1);
    // The next change begins another one.
    let (_, next) = scene.set(&id, "COLOR", "blue").await;
    assert_ne!(next, proposal);
    scene.number(&next).await;
    assert_eq!(scene.forge.pulls().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_that_was_renamed_is_said_and_goes_on_under_its_name() {
    let scene = Scene::start(rules()).await;
    let id = scene.direct("front").await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    scene.forge.api("PATCH", "", &json!({ "name": "other" })).await;
    let said = |task: &Value| task["steps"][1]["message"].as_str().is_some_and(|said| said.starts_with("Waiting: "));
    scene.until_task("the task says so", &task, said).await;
    let rename = json!({ "name": REPOSITORY });
    scene.forge.gitea.api("PATCH", &format!("repos/{ADMIN}/other"), &rename).await;
    scene.until("it is in review again", &proposal, says("In review: pull request #")).await;
    scene.forge.merge(number, "merge").await;
    scene.until_state(&proposal, "MERGED").await;
    assert_eq!(scene.forge.pulls().await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_webhook_tells_at_once_and_only_the_forge_is_believed() {
    let forge = Reviewed::start().await;
    let mut server = Server::new(None);
    // Nothing is looked at by itself.
    server.set("STYRMIN_FORGE_POLL", Some("3600"));
    server.set("STYRMIN_GIT_POLL", Some("3600"));
    let git = forge.git();
    let scene = Scene::on(forge, server, git, rules()).await;
    let address = format!("{}/webhooks/c", scene.server.address());
    let post = async |signature: Option<&str>| {
        let mut request = http().post(&address).body("{}");
        if let Some(signature) = signature {
            request = request.header("x-gitea-signature", signature);
        }
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(post(None).await, 403);
    assert_eq!(post(Some(&"0".repeat(64))).await, 403);
    let nowhere = http().post(format!("{}/webhooks/unknown", scene.server.address())).body("{}").send().await.unwrap();
    assert_eq!(nowhere.status().as_u16(), 403);

    let config = json!({ "url": address, "content_type": "json", "secret": SECRET });
    let events = ["pull_request", "push", "issue_comment"];
    let hook = json!({ "type": "gitea", "active": true, "events": events, "config": config });
    scene.forge.api("POST", "/hooks", &hook).await;
    let id = scene.direct("front").await;
    let (task, proposal) = scene.set(&id, "COLOR", "blue").await;
    let number = scene.number(&proposal).await;
    let body = json!({ "body": "Why blue? @nobody" });
    scene.forge.as_rita("POST", &format!("/issues/{number}/comments"), &body).await.unwrap();
    let timeline = "query($id: ID!) { deployment(id: $id) { timeline(first: 50) { nodes { kind title message } } } }";
    eventually("the comment is in the timeline", LIMIT, async || {
        let found = scene.client.ok(timeline, json!({ "id": id })).await.to_string();
        if found.contains("rita: Why blue?") { Ok(()) } else { Err(found) }
    })
    .await;
    scene.forge.merge(number, "squash").await;
    scene.until_state(&proposal, "MERGED").await;
    scene.until_task("its task goes on", &task, |task| task["steps"][1]["state"] == "SUCCEEDED").await;
    assert!(!scene.server.log().contains(SECRET));
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_forge_the_branch_waits_for_its_merge() {
    let mut server = Server::new(None);
    quick(&mut server);
    server.up().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c", "delivery": rules() })).await;
    let environment = client.environment(&cluster, "e").await;
    let query = "mutation($input: CreateDeploymentInput!) { createDeployment(input: $input) { deployment { id } task { id } proposal { id headBranch } } }";
    let input = |name: &str| json!({ "environment": environment, "name": name, "driver": "web-application", "applicationVersion": "1.27", "parameters": { "image": "nginx" } });
    let proposal = async |id: &Value| {
        client.ok("query($id: ID!) { proposal(id: $id) { state message } }", json!({ "id": id })).await["proposal"]
            .clone()
    };
    let until = async |id: &Value, what: &str, good: &dyn Fn(&Value) -> bool| {
        eventually(what, LIMIT, async || {
            let found = proposal(id).await;
            if good(&found) { Ok(()) } else { Err(found) }
        })
        .await;
    };
    let made = client.ok(query, json!({ "input": input("front") })).await["createDeployment"].clone();
    let branch = made["proposal"]["headBranch"].as_str().unwrap().to_owned();
    until(&made["proposal"]["id"], "the branch waits", &|found| {
        found["message"].as_str().is_some_and(|said| said.contains("merge the branch"))
    })
    .await;
    let person = Person::over_http(&server, "c").await;
    person.git(&["merge", "--quiet", "--no-ff", "-m", "Good", &format!("origin/{branch}")]).await;
    person.git(&["push", "--quiet", "origin", "main"]).await;
    until(&made["proposal"]["id"], "it is merged", &|found| found["state"] == "MERGED").await;
    eventually("its branch is gone", LIMIT, async || {
        let left = git::git(&server.hosted(&cluster), &["branch", "--list", "styrmin/*"]).await;
        if left.trim().is_empty() { Ok(()) } else { Err(left) }
    })
    .await;

    // A branch that somebody deletes is a no.
    let made = client.ok(query, json!({ "input": input("back") })).await["createDeployment"].clone();
    let branch = made["proposal"]["headBranch"].as_str().unwrap().to_owned();
    until(&made["proposal"]["id"], "the branch waits", &|found| {
        found["message"].as_str().is_some_and(|said| said.contains("merge the branch"))
    })
    .await;
    assert!(
        !git::succeeds(person.work(), &["push", "--quiet", "origin", "--delete", "main"]).await,
        "what Flux follows"
    );
    person.git(&["push", "--quiet", "origin", "--delete", &branch]).await;
    until(&made["proposal"]["id"], "it is closed", &|found| found["state"] == "CLOSED").await;
    let task =
        client.ok("query($id: ID!) { task(id: $id) { state message } }", json!({ "id": made["task"]["id"] })).await;
    assert_eq!(task["task"]["state"], "REJECTED", "{task}");
}

/// Each point of a proposal's way, on both databases: whatever dies, there is one request, and what was accepted
/// comes to the branch.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_on_the_way_opens_one_request_and_loses_nothing() {
    let postgres = Postgres::start().await;
    let forge = Reviewed::start().await;
    let mut server = Server::new(Some(postgres.database().await));
    quick(&mut server);
    let git = forge.git();
    let mut scene = Scene::on(forge, server, git, rules()).await;
    let ids = [scene.direct("front").await, scene.direct("back").await];
    let update = "mutation($id: ID!, $config: ConfigPatch!) { updateEnvironment(id: $id, config: $config) { fanOut { proposal { id } } } }";
    for (round, point) in faults::REVIEW.iter().enumerate() {
        scene.server.kill().await;
        scene.server.set("STYRMIN_FAULT", Some(point));
        scene.server.up().await;
        let value = round.to_string();
        let config = json!({ "set": { "env_vars": { "ROUND": value } } });
        let asked = scene.client.ok(update, json!({ "id": scene.environment, "config": config })).await;
        let proposal = asked["updateEnvironment"]["fanOut"]["proposal"]["id"].as_str().unwrap().to_owned();
        let is_later = point.ends_with("level") || point.ends_with("part");
        if is_later {
            let number = scene.number(&proposal).await;
            scene.forge.merge(number, "merge").await;
        }
        let status = scene.server.ended().await;
        assert!(!status.success(), "{point}");
        scene.server.set("STYRMIN_FAULT", None);
        scene.server.up().await;
        if !is_later {
            let number = scene.number(&proposal).await;
            scene.forge.merge(number, "merge").await;
        }
        scene.until_state(&proposal, "MERGED").await;
        for id in &ids {
            eventually("it is taken over", LIMIT, async || {
                let found = scene.proposal(&proposal).await;
                let open = found["items"].as_array().unwrap().iter().any(|item| item["state"] != "MERGED");
                if open { Err(found) } else { Ok(()) }
            })
            .await;
            let document = scene.document("main", id).await.unwrap();
            assert_eq!(
                document["spec"]["context"]["instance"]["config"]["env_vars"]["ROUND"],
                value.as_str(),
                "{point}"
            );
            let found = scene.deployment(id).await;
            assert_eq!(document["spec"]["instanceId"], found["newestInstance"]["id"], "{point}");
        }
        assert_eq!(scene.forge.pulls().await.len(), round + 1, "{point}");
    }
    // Every instance is named in one commit of ours.
    let log = scene.forge.clone_of("main").await.git(&["log", "--format=%B", "main"]).await;
    let mut named: Vec<&str> = log.lines().filter(|line| line.starts_with("Styrmin-Instance: ")).collect();
    let all = named.len();
    named.sort_unstable();
    named.dedup();
    assert_eq!(named.len(), all);
}
