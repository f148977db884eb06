//! What people change in a repository by hand, as the server sees it: every kind of edit under every policy. The same
//! with Flux and the operator is in `edits_in_cluster`.

use serde_json::{Value, json};
use std::time::Duration;
use styrmin_client::Client;
use styrmin_renderer::yaml;
use styrmin_tests::agent::Agent;
use styrmin_tests::people::Person;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git};

const LIMIT: Duration = Duration::from_secs(30);

/// A cluster whose repository the server hosts, and a person with a clone of it.
struct World {
    server: Server,
    client: Client,
    cluster: String,
    environment: String,
    token: String,
    pat: Person,
}

impl World {
    async fn start(policy: &str, deployments: &[&str]) -> (Self, Vec<String>) {
        let server = Server::start().await;
        let client = server.client();
        let (cluster, token) = client.cluster(json!({ "name": "c", "edits": { "policy": policy } })).await;
        let environment = client.environment(&cluster, "e").await;
        let mut ids = Vec::new();
        for name in deployments {
            ids.push(client.web(&environment, name).await.0);
        }
        server.drained(LIMIT).await;
        let pat = Person::over_http(&server, &cluster).await;
        (Self { server, client, cluster, environment, token, pat }, ids)
    }

    async fn files(&self) -> std::collections::BTreeMap<String, String> {
        git::files(&self.server.hosted(&self.cluster)).await
    }

    /// The document of a deployment as the repository has it; `None`: it has none.
    async fn document(&self, deployment: &str) -> Option<Value> {
        let end = format!("{deployment}/styrmindeployment.yaml");
        let files = self.files().await;
        files.iter().find(|(path, _)| path.ends_with(&end)).map(|(_, text)| yaml::from_str(text).unwrap())
    }

    async fn look(&self, deployment: &str) -> Value {
        let query = "query($id: ID!) { deployment(id: $id) { state lifecycle config parameters applicationVersion \
            newestInstance { id sequence state author { name email } workflow document } \
            edits { nodes { id kind state message path commit author { name email } task { id state } } } \
            tasks { nodes { id state workflow message steps { name state message } } } \
            timeline { nodes { kind title message } } } }";
        self.client.ok(query, json!({ "id": deployment })).await["deployment"].clone()
    }

    /// Waits until the newest edit of a deployment came to this state and nothing waits any more; gives the
    /// deployment.
    async fn until(&self, deployment: &str, state: &str) -> Value {
        let found = eventually(&format!("an edit that is {state}"), LIMIT, async || {
            let found = self.look(deployment).await;
            if found["edits"]["nodes"][0]["state"] == state { Ok(found) } else { Err(found["edits"].clone()) }
        })
        .await;
        if state != "HELD" {
            self.server.drained(LIMIT).await;
            return self.look(deployment).await;
        }
        found
    }

    /// What the repository holds is what the newest instance says.
    async fn is_whole(&self, deployment: &str) {
        let look = self.look(deployment).await;
        let files = self.files().await;
        let end = format!("{deployment}/styrmindeployment.yaml");
        let text = files.iter().find(|(path, _)| path.ends_with(&end)).map(|(_, text)| text.as_str());
        assert_eq!(text, look["newestInstance"]["document"].as_str(), "{deployment}");
    }

    async fn decide(&self, edit: &Value, decision: &str) -> Result<Value, styrmin_client::ClientError> {
        let query = "mutation($id: ID!, $d: EditDecision!) { decideEdit(id: $id, decision: $d) { id state message } }";
        Ok(self.client.execute(query, json!({ "id": edit["id"], "d": decision })).await?["decideEdit"].clone())
    }

    async fn log(&self) -> String {
        git::git(&self.server.hosted(&self.cluster), &["log", "--format=%H %an <%ae>%n%B", "main"]).await
    }
}

fn paint(document: &mut Value, color: &str) {
    document["spec"]["context"]["instance"]["config"]["env_vars"]["COLOR"] = json!(color);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_becomes_a_change_of_its_author() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    let shop = &ids[0];
    world.pat.edit(shop, |document| {
        paint(document, "blue");
        document["spec"]["context"]["components"]["web"]["replicas"] = json!(3);
        document["spec"]["context"]["parameters"]["image"] = json!("httpd");
        document["spec"]["lifecycle"] = json!("stopped");
        // What nobody can set there.
        document["spec"]["context"]["deployment"]["name"] = json!("mine");
        document["metadata"]["labels"]["team"] = json!("a");
    });
    let commit = world.pat.push("Blue").await;
    let found = world.until(shop, "ADOPTED").await;
    let edit = &found["edits"]["nodes"][0];
    assert_eq!((&edit["kind"], &edit["commit"]), (&json!("CHANGED"), &json!(commit)));
    assert_eq!(edit["author"], json!({ "name": "Pat", "email": "pat@example.com" }));
    let message = edit["message"].as_str().unwrap();
    for part in
        ["taken over: ", "context.instance.config.env_vars.COLOR", "put back: context.deployment.name", "metadata"]
    {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert_eq!(found["config"], json!({ "env_vars": { "COLOR": "blue" }, "components": { "web": { "replicas": 3 } } }));
    assert_eq!((&found["parameters"]["image"], &found["lifecycle"]), (&json!("httpd"), &json!("STOPPED")));
    assert_eq!(found["newestInstance"]["sequence"], 2);
    assert_eq!(found["newestInstance"]["author"], json!({ "name": "Pat", "email": "pat@example.com" }));
    assert_eq!(edit["task"]["id"], found["tasks"]["nodes"][0]["id"]);
    world.is_whole(shop).await;
    let document = world.document(shop).await.unwrap();
    assert_eq!(document["metadata"]["labels"].get("team"), None, "what cannot be said is put back");
    assert_eq!(document["spec"]["context"]["deployment"]["name"], "shop");
    // The timeline and the history say who it was.
    let entries = found["timeline"]["nodes"].as_array().unwrap();
    let entry = entries.iter().find(|entry| entry["kind"] == "EDITED").expect("an entry of the timeline");
    assert!(entry["message"].as_str().unwrap().contains("by Pat <pat@example.com>, adopted"), "{entry}");
    let log = world.log().await;
    assert!(log.contains("Changed-By: Pat <pat@example.com>"), "{log}");
    // Nothing comes of it once more.
    let head = world.pat.git(&["ls-remote", "origin", "main"]).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(world.pat.git(&["ls-remote", "origin", "main"]).await, head);
    assert_eq!(world.look(shop).await["edits"]["nodes"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revert_takes_the_deployment_back() {
    let (world, ids) = World::start("ADOPT", &["shop", "other"]).await;
    let shop = &ids[0];
    world.client.set_variable(shop, "COLOR", "blue").await.unwrap();
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    world.pat.git(&["revert", "--no-edit", "HEAD"]).await;
    world.pat.push("and more").await;
    let found = world.until(shop, "ADOPTED").await;
    let edit = &found["edits"]["nodes"][0];
    assert_eq!((&edit["kind"], &edit["message"]), (&json!("REVERTED"), &json!("back to change 1")));
    assert_eq!(found["config"], json!({}));
    assert_eq!(
        (&found["newestInstance"]["sequence"], &found["newestInstance"]["author"]["name"]),
        (&json!(3), &json!("Pat"))
    );
    world.is_whole(shop).await;
    assert_eq!(world.look(&ids[1]).await["newestInstance"]["sequence"], 1, "others stay as they are");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_and_a_change_at_the_same_time_both_count() {
    let (mut world, ids) = World::start("ADOPT", &["shop"]).await;
    let shop = &ids[0];
    // The change is accepted while the repository refuses; the person gets in first.
    let hosted = world.server.hosted(&world.cluster);
    let closed = Closed::to_the_server(&hosted);
    world.client.set_variable(shop, "SIZE", "xl").await.unwrap();
    world.pat.edit(shop, |document| paint(document, "blue"));
    world.pat.push("Blue").await;
    drop(closed);
    let found = world.until(shop, "ADOPTED").await;
    assert_eq!(found["config"], json!({ "env_vars": { "COLOR": "blue", "SIZE": "xl" } }));
    world.is_whole(shop).await;
    // A server that was away finds what happened meanwhile.
    world.server.kill().await;
    let outside = Person::of(hosted.to_str().unwrap()).await;
    outside.edit(shop, |document| paint(document, "red"));
    outside.push("Red").await;
    world.server.up().await;
    let found = eventually("the edit is found", LIMIT, async || {
        let found = world.look(shop).await;
        if found["config"]["env_vars"]["COLOR"] == "red" { Ok(found) } else { Err(found["edits"].clone()) }
    })
    .await;
    assert_eq!(found["config"]["env_vars"]["SIZE"], "xl");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_no_configuration_can_say_is_put_back_with_the_reason() {
    let names = ["moved", "renamed", "emptied", "broken", "foreign", "bad", "same"];
    let (world, ids) = World::start("ADOPT", &names).await;
    let before = world.files().await;
    let [moved, renamed, emptied, broken, foreign, bad, same] = ids.try_into().unwrap();
    let elsewhere = world.client.environment(&world.cluster, "elsewhere").await;
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    let path = |id: &str| world.pat.path(id);
    let folder = path(&moved).replace("/styrmindeployment.yaml", "");
    world.pat.git(&["mv", &folder, &format!("environments/{elsewhere}/s0/{moved}")]).await;
    let away = path(&renamed).replace("styrmindeployment", "app");
    world.pat.git(&["mv", &path(&renamed), &away]).await;
    world.pat.write(&path(&emptied), "");
    let text = world.pat.read(&path(&broken)).replacen("apiVersion:", "piVersion:", 1);
    world.pat.write(&path(&broken), &text);
    world.pat.edit(&foreign, |document| document["spec"]["deploymentId"] = json!("aaaaaaaaaaaa"));
    world.pat.edit(&bad, |document| document["spec"]["context"]["components"]["web"]["replicas"] = json!("many"));
    world.pat.edit(&same, |document| document["spec"]["context"]["app"]["name"] = json!("other"));
    let commit = world.pat.push("A bad day").await;
    for (id, kind, said) in [
        (&moved, "MOVED", "one place for ever"),
        (&renamed, "MOVED", "one place for ever"),
        (&emptied, "EMPTIED", "an empty file says nothing"),
        (&broken, "BROKEN", "apiVersion: is missing, not \"styrmin.io/v1alpha1\""),
        (&foreign, "BROKEN", "line "),
        (&bad, "CHANGED", "config.components.web.replicas"),
        (&same, "CHANGED", "put back: context.app.name"),
    ] {
        let found = world.until(id, "RESTORED").await;
        let edits = found["edits"]["nodes"].as_array().unwrap();
        for edit in edits {
            assert_eq!((&edit["kind"], &edit["commit"]), (&json!(kind), &json!(commit)), "{edit}");
            assert!(edit["message"].as_str().unwrap().contains(said), "{edit}");
        }
        assert_eq!(found["newestInstance"]["sequence"], 1, "{kind}: a file that is put back is no change");
    }
    let after = world.files().await;
    for (path, text) in &before {
        assert_eq!(after.get(path), Some(text), "{path}");
    }
    assert!(!after.keys().any(|path| path.ends_with("app.yaml") || path.contains(&format!("{elsewhere}/s0/{moved}"))));
    // The commit says what it does, and names no instance.
    let log = world.log().await;
    let restored: Vec<&str> = log.split("Styrmin <").nth(1).unwrap().split("Pat <").next().unwrap().lines().collect();
    let restored = restored.join("\n");
    assert!(restored.contains("Put back 9 files that others changed"), "{restored}");
    assert!(restored.contains("put back deployment emptied, which Pat changed in"), "{restored}");
    assert_eq!(restored.matches("Styrmin-Restored: ").count(), 9, "{restored}");
    assert!(!restored.contains("Styrmin-Instance"), "{restored}");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_environments_drivers_and_charts_are_put_back_and_files_of_others_left_alone() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    let before = world.files().await;
    let find = |start: &str| before.keys().find(|path| path.starts_with(start)).unwrap().clone();
    let (driver, chart) = (find("cluster/drivers/"), find("charts/"));
    let environment = format!("cluster/environments/{}.yaml", world.environment);
    let keep = format!("environments/{}/s0/keep.yaml", world.environment);
    world.pat.write(&driver, "kind: Nothing\n");
    world.pat.write(&environment, "");
    world.pat.git(&["rm", "--quiet", &keep, &chart]).await;
    // These are people's own.
    world.pat.write("README.md", "Ours now.\n");
    world.pat.write("cluster/extra.yaml", "kind: ConfigMap\n");
    world.pat.write(&format!("environments/{}/s0/{}/notes.yaml", world.environment, ids[0]), "kind: ConfigMap\n");
    world.pat.write("flux/styrmin.yaml", "# by hand\n");
    world.pat.push("Spring cleaning").await;
    let query = "query($id: ID!) { cluster(id: $id) { edits { nodes { kind state path } } } }";
    eventually("all of it is put back", LIMIT, async || {
        let found = world.client.ok(query, json!({ "id": world.cluster })).await["cluster"]["edits"]["nodes"].clone();
        let is_done = |path: &String| {
            found.as_array().unwrap().iter().any(|edit| edit["path"] == **path && edit["state"] == "RESTORED")
        };
        if [&driver, &environment, &keep, &chart].into_iter().all(is_done) { Ok(()) } else { Err(found) }
    })
    .await;
    let after = world.files().await;
    for path in [&driver, &environment, &keep, &chart] {
        assert_eq!(after.get(path), before.get(path), "{path}");
    }
    assert_eq!(after["README.md"], "Ours now.\n");
    assert_eq!(after["flux/styrmin.yaml"], "# by hand\n");
    assert!(after.contains_key("cluster/extra.yaml") && after.keys().any(|path| path.ends_with("notes.yaml")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_waits_for_a_word() {
    let (world, ids) = World::start("ADOPT", &["one", "two", "three", "four"]).await;
    for id in &ids[..3] {
        let folder = world.pat.path(id).replace("/styrmindeployment.yaml", "");
        world.pat.git(&["rm", "-r", "--quiet", &folder]).await;
    }
    world.pat.push("Not needed").await;
    let [one, two, three, four] = ids.try_into().unwrap();
    for id in [&one, &two, &three] {
        let found = world.until(id, "WAITING").await;
        assert_eq!(found["edits"]["nodes"][0]["kind"], "REMOVED");
        assert_eq!((&found["lifecycle"], &found["newestInstance"]["sequence"]), (&json!("RUNNING"), &json!(1)));
        let said = found["edits"]["nodes"][0]["message"].as_str().unwrap();
        assert!(said.contains("the application runs on until somebody confirms"), "{said}");
    }
    // One is confirmed, one is put back, one is changed by somebody who wants it.
    let edit = world.look(&one).await["edits"]["nodes"][0].clone();
    assert_eq!(world.decide(&edit, "ADOPT").await.unwrap()["state"], "ADOPTED");
    let again = world.decide(&edit, "RESTORE").await.unwrap_err().to_string();
    assert!(again.contains("only an edit that is held or waits can be decided"), "{again}");
    let edit = world.look(&two).await["edits"]["nodes"][0].clone();
    world.decide(&edit, "RESTORE").await.unwrap();
    world.client.set_variable(&three, "COLOR", "blue").await.unwrap();
    let found = world.until(&one, "ADOPTED").await;
    assert_eq!((&found["lifecycle"], &found["state"]), (&json!("DELETING"), &json!("DELETING")));
    assert_eq!(found["newestInstance"]["author"]["name"], "Pat");
    assert_eq!(world.document(&one).await, None);
    world.until(&two, "RESTORED").await;
    world.is_whole(&two).await;
    world.until(&three, "SUPERSEDED").await;
    world.is_whole(&three).await;
    let log = world.log().await;
    assert!(log.to_lowercase().contains("put back deployment two, which pat changed in"), "{log}");
    // A word in a file asks first, whatever the threshold; so does nobody for another cluster.
    world.pat.pull().await;
    world.pat.edit(&four, |document| document["spec"]["lifecycle"] = json!("deleting"));
    world.pat.push("Please go").await;
    let found = world.until(&four, "WAITING").await;
    let edit = &found["edits"]["nodes"][0];
    assert!(edit["message"].as_str().unwrap().starts_with("a word in a file is no removal yet"), "{edit}");
    world.decide(edit, "RESTORE").await.unwrap();
    world.until(&four, "RESTORED").await;
    // Up to the threshold nobody is asked.
    let query = "mutation($id: ID!) { updateCluster(id: $id, edits: { removalThreshold: 1 }) { cluster { removalThreshold editPolicy } } }";
    let cluster = world.client.ok(query, json!({ "id": world.cluster })).await["updateCluster"]["cluster"].clone();
    assert_eq!(cluster, json!({ "removalThreshold": 1, "editPolicy": "ADOPT" }));
    world.pat.pull().await;
    world.pat.git(&["rm", "--quiet", &world.pat.path(&four)]).await;
    world.pat.push("Nor this").await;
    let found = world.until(&four, "ADOPTED").await;
    assert_eq!(found["lifecycle"], "DELETING");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_that_was_confirmed_on_the_object_ends_the_deployment() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    let shop = &ids[0];
    let mut agent = Agent::new(&world.server, &world.token, "agent-1", 1);
    let look = world.look(shop).await;
    let object = json!({
        "deploymentId": shop, "uid": "object-1", "namespace": format!("styrmin-env-{}", world.environment),
        "name": format!("styrmin-{shop}"), "instanceId": look["newestInstance"]["id"], "phase": "Deleting",
        "displayState": "Error", "message": Value::Null, "specDigest": Value::Null, "observedGeneration": 1,
        "generation": 1, "deleting": true, "driftCorrections": 0, "conditions": [], "steps": [],
    });
    agent.deployments(std::slice::from_ref(&object)).await;
    world.pat.git(&["rm", "--quiet", &world.pat.path(shop)]).await;
    world.pat.push("Away").await;
    world.until(shop, "WAITING").await;
    // That it is not there for a while is no word: Flux may apply it anew.
    let gone = async |agent: &mut Agent| {
        agent.deployments(&[]).await;
        agent.report("pods", json!([])).await.unwrap();
    };
    gone(&mut agent).await;
    tokio::time::sleep(Duration::from_secs(35)).await;
    assert_eq!(world.look(shop).await["edits"]["nodes"][0]["state"], "WAITING", "nobody confirmed it");
    let mut confirmed = object.clone();
    confirmed["conditions"] = json!([{ "type": "Ready", "status": "False", "reason": "Deleting", "message": "Ann said so", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
    agent.deployments(&[confirmed]).await;
    gone(&mut agent).await;
    let found = eventually("the removal is taken over", Duration::from_secs(45), async || {
        let found = world.look(shop).await;
        if found["edits"]["nodes"][0]["state"] == "ADOPTED" { Ok(found) } else { Err(found["edits"].clone()) }
    })
    .await;
    assert_eq!(found["lifecycle"], "DELETING");
    let said = found["edits"]["nodes"][0]["message"].as_str().unwrap();
    assert!(said.contains("confirmed the removal on the object"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reverted_removal_brings_the_deployment_back() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    let shop = &ids[0];
    world.client.set_variable(shop, "COLOR", "blue").await.unwrap();
    world.server.drained(LIMIT).await;
    world.client.delete(shop).await.unwrap();
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    world.pat.git(&["revert", "--no-edit", "HEAD"]).await;
    world.pat.push("and more").await;
    let found = world.until(shop, "ADOPTED").await;
    assert_eq!(found["edits"]["nodes"][0]["kind"], "RETURNED");
    assert_eq!((&found["lifecycle"], &found["state"]), (&json!("RUNNING"), &json!("DEPLOYING")));
    assert_eq!(found["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    assert_eq!(found["tasks"]["nodes"][1]["state"], "SUPERSEDED", "its end");
    world.is_whole(shop).await;
    // When its name is another's by now it goes again.
    world.client.delete(shop).await.unwrap();
    world.server.drained(LIMIT).await;
    world.client.web(&world.environment, "shop").await;
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    world.pat.git(&["revert", "--no-edit", "HEAD~1"]).await;
    world.pat.push("and more").await;
    let found = world.until(shop, "RESTORED").await;
    let said = found["edits"]["nodes"][0]["message"].as_str().unwrap();
    assert!(said.contains("has its name now"), "{said}");
    assert_eq!(world.document(shop).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn edits_of_a_cluster_that_restores_are_put_back() {
    let (world, ids) = World::start("RESTORE", &["changed", "reverted", "removed", "returned"]).await;
    let [changed, reverted, removed, returned] = ids.try_into().unwrap();
    world.client.set_variable(&reverted, "COLOR", "blue").await.unwrap();
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    world.client.delete(&returned).await.unwrap();
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    let before = world.files().await;
    world.pat.git(&["revert", "--no-commit", "HEAD", "HEAD~1"]).await;
    world.pat.edit(&changed, |document| paint(document, "red"));
    world.pat.git(&["rm", "--quiet", &world.pat.path(&removed)]).await;
    world.pat.push("All kinds").await;
    for (id, kind) in [(&changed, "CHANGED"), (&reverted, "REVERTED"), (&removed, "REMOVED"), (&returned, "RETURNED")] {
        let found = world.until(id, "RESTORED").await;
        assert_eq!(found["edits"]["nodes"][0]["kind"], kind);
    }
    assert_eq!(world.files().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn edits_of_a_cluster_that_holds_wait_for_a_decision() {
    let names = ["adopted", "restored", "undone", "removed", "broken"];
    let (world, ids) = World::start("HOLD", &names).await;
    let [adopted, restored, undone, removed, broken] = ids.try_into().unwrap();
    for id in [&adopted, &restored, &undone] {
        world.pat.edit(id, |document| paint(document, "red"));
    }
    world.pat.git(&["rm", "--quiet", &world.pat.path(&removed)]).await;
    world.pat.write(&world.pat.path(&broken), "{");
    let commit = world.pat.push("Red").await;
    for id in [&adopted, &restored, &undone, &removed, &broken] {
        let found = world.until(id, "HELD").await;
        assert_eq!(found["newestInstance"]["sequence"], 1);
    }
    // A change of the deployment waits, and says what for.
    for id in [&adopted, &restored, &undone] {
        world.client.set_variable(id, "SIZE", "xl").await.unwrap();
    }
    let other = world.client.web(&world.environment, "free").await.0;
    eventually("another deployment's change is written", LIMIT, async || {
        world.document(&other).await.map(drop).ok_or("no document")
    })
    .await;
    for id in [&adopted, &restored, &undone] {
        let found = world.look(id).await;
        let step = found["tasks"]["nodes"][0]["steps"][0].clone();
        assert!(step["message"].as_str().is_some_and(|said| said.contains(&commit)), "{step}");
        assert_eq!(
            world.document(id).await.unwrap()["spec"]["context"]["instance"]["config"]["env_vars"],
            json!({ "COLOR": "red" })
        );
    }
    let edit = async |id: &str| world.look(id).await["edits"]["nodes"][0].clone();
    world.decide(&edit(&adopted).await, "ADOPT").await.unwrap();
    world.decide(&edit(&restored).await, "RESTORE").await.unwrap();
    world.decide(&edit(&removed).await, "ADOPT").await.unwrap();
    let refused = world.decide(&edit(&broken).await, "ADOPT").await.unwrap_err().to_string();
    assert!(refused.contains("it cannot be adopted: line "), "{refused}");
    world.decide(&edit(&broken).await, "RESTORE").await.unwrap();
    // Whoever undoes the edit in Git has decided too.
    world.pat.pull().await;
    world.pat.edit(&undone, |document| {
        document["spec"]["context"]["instance"]["config"].as_object_mut().unwrap().remove("env_vars");
    });
    world.pat.push("Not red").await;
    world.until(&undone, "SUPERSEDED").await;
    for (id, config) in [
        (&adopted, json!({ "env_vars": { "COLOR": "red", "SIZE": "xl" } })),
        (&restored, json!({ "env_vars": { "SIZE": "xl" } })),
        (&undone, json!({ "env_vars": { "SIZE": "xl" } })),
    ] {
        world.server.drained(LIMIT).await;
        assert_eq!(world.look(id).await["config"], config);
        world.is_whole(id).await;
    }
    assert_eq!(world.look(&removed).await["lifecycle"], "DELETING");
    world.until(&broken, "RESTORED").await;
    world.is_whole(&broken).await;
}

/// Refuses what the server pushes to its own repository, until the value goes.
struct Closed(std::path::PathBuf);

impl Closed {
    fn to_the_server(hosted: &std::path::Path) -> Self {
        // People push over HTTP, where they have a name.
        git::hook(hosted, "pre-receive", "[ -n \"$REMOTE_USER\" ]");
        Self(hosted.join("hooks/pre-receive"))
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_changes_their_mind_before_it_is_written_is_heard() {
    let (world, ids) = World::start("ADOPT", &["renamed", "undone", "kept"]).await;
    let closed = Closed::to_the_server(&world.server.hosted(&world.cluster));
    let paint = |document: &mut Value, name: &str| {
        let config = document["spec"]["context"]["instance"]["config"].as_object_mut().unwrap();
        config.insert("env_vars".into(), json!({ name: "red" }));
    };
    for id in &ids {
        world.pat.edit(id, |document| paint(document, "COLOUR"));
    }
    world.pat.push("Red").await;
    for id in &ids {
        eventually("it is adopted", LIMIT, async || {
            let found = world.look(id).await;
            if found["edits"]["nodes"][0]["state"] == "ADOPTED" { Ok(()) } else { Err(found["edits"].clone()) }
        })
        .await;
    }
    world.pat.edit(&ids[0], |document| paint(document, "COLOR"));
    world.pat.git(&["checkout", "--quiet", "HEAD~1", "--", &world.pat.path(&ids[1])]).await;
    world.pat.push("Not like that").await;
    for id in &ids[..2] {
        eventually("it is adopted again", LIMIT, async || {
            let found = world.look(id).await;
            if found["edits"]["nodes"][1]["state"] == "ADOPTED" { Ok(()) } else { Err(found["edits"].clone()) }
        })
        .await;
    }
    drop(closed);
    world.server.drained(LIMIT).await;
    for (id, config) in ids.iter().zip([
        json!({ "env_vars": { "COLOR": "red" } }),
        json!({}),
        json!({ "env_vars": { "COLOUR": "red" } }),
    ]) {
        assert_eq!(world.look(id).await["config"], config);
        world.is_whole(id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_below_a_commit_of_ours_is_found() {
    let (world, ids) = World::start("ADOPT", &["front", "back"]).await;
    let hosted = world.server.hosted(&world.cluster);
    let outside = Person::of(hosted.to_str().unwrap()).await;
    outside.edit(&ids[0], |document| paint(document, "blue"));
    // While the server pushes a change of something else, and nobody has told it.
    outside.git(&["commit", "--quiet", "-am", "Blue"]).await;
    let commit = outside.git(&["rev-parse", "HEAD"]).await.trim().to_owned();
    outside.git(&["push", "--quiet", "origin", "HEAD:refs/heads/aside"]).await;
    git::hook(
        &hosted,
        "pre-receive",
        &format!(
            "[ -f {0}/once ] || {{ touch {0}/once; unset GIT_QUARANTINE_PATH; git update-ref refs/heads/main {commit}; exit 1; }}",
            hosted.display()
        ),
    );
    world.client.set_variable(&ids[1], "SIZE", "xl").await.unwrap();
    let found = world.until(&ids[0], "ADOPTED").await;
    assert_eq!(found["config"], json!({ "env_vars": { "COLOR": "blue" } }));
    world.is_whole(&ids[0]).await;
    world.is_whole(&ids[1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_somebody_commits_blocks_the_others() {
    let (world, ids) = World::start("ADOPT", &["nul", "folder", "odd", "free"]).await;
    let [nul, folder, odd, free] = ids.try_into().unwrap();
    let before = world.files().await;
    world.pat.write(&world.pat.path(&nul), "kind: StyrminDeployment\nspec: {instanceId: \"a\0b\"}\n");
    let path = world.pat.path(&folder);
    world.pat.git(&["rm", "--quiet", &path]).await;
    let place = path.replace("/styrmindeployment.yaml", "");
    let _ = std::fs::remove_dir_all(world.pat.work().join(&place));
    world.pat.write(&place, "a file\n");
    world.pat.push("Strange").await;
    world.until(&nul, "RESTORED").await;
    world.pat.pull().await;
    // Other programs write names that Git would not.
    world.pat.edit(&odd, |document| paint(document, "blue"));
    world.pat.git(&["add", "-A"]).await;
    let tree = world.pat.git(&["write-tree"]).await.trim().to_owned();
    let parent = world.pat.git(&["rev-parse", "HEAD"]).await.trim().to_owned();
    let raw = format!("tree {tree}\nparent {parent}\nauthor ;; <;;> 1 +0000\ncommitter ;; <;;> 1 +0000\n\nOdd\n");
    let file = world.pat.work().join(".git/odd");
    std::fs::write(&file, raw).unwrap();
    let made = world.pat.git(&["hash-object", "-t", "commit", "-w", "--literally", file.to_str().unwrap()]).await;
    world.pat.git(&["reset", "--quiet", "--hard", made.trim()]).await;
    world.pat.git(&["push", "--quiet", "origin", "HEAD:main"]).await;
    world.until(&odd, "ADOPTED").await;
    let found = world.look(&odd).await;
    assert_eq!(found["newestInstance"]["author"]["name"], "unknown", "{found:#}");
    let edit = world.look(&folder).await["edits"]["nodes"][0].clone();
    assert_eq!((&edit["kind"], &edit["state"]), (&json!("REMOVED"), &json!("WAITING")));
    world.decide(&edit, "RESTORE").await.unwrap();
    world.until(&folder, "RESTORED").await;
    world.client.set_variable(&free, "SIZE", "xl").await.unwrap();
    world.server.drained(LIMIT).await;
    world.is_whole(&free).await;
    let after = world.files().await;
    for id in [&nul, &folder] {
        let path = before.keys().find(|path| path.contains(id.as_str())).unwrap();
        assert_eq!(after.get(path), before.get(path), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_that_goes_back_and_forth_is_read_each_time() {
    let (world, ids) = World::start("HOLD", &["shop"]).await;
    let (shop, hosted) = (&ids[0], world.server.hosted(&world.cluster));
    let first = world.pat.git(&["rev-parse", "HEAD"]).await.trim().to_owned();
    world.pat.edit(shop, |document| paint(document, "blue"));
    let second = world.pat.push("Blue").await;
    let states = async |wanted: &[&str]| {
        eventually(&format!("edits are {wanted:?}"), LIMIT, async || {
            // Whoever asks for anything has the server look.
            world
                .client
                .ok("mutation($id: ID!) { updateCluster(id: $id) { cluster { id } } }", json!({ "id": world.cluster }))
                .await;
            let found = world.look(shop).await["edits"]["nodes"].clone();
            let is: Vec<&str> = found.as_array().unwrap().iter().map(|edit| edit["state"].as_str().unwrap()).collect();
            if is == wanted { Ok(()) } else { Err(found) }
        })
        .await;
    };
    states(&["HELD"]).await;
    git::git(&hosted, &["update-ref", "refs/heads/main", &first]).await;
    states(&["SUPERSEDED"]).await;
    git::git(&hosted, &["update-ref", "refs/heads/main", &second]).await;
    states(&["HELD", "SUPERSEDED"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_edit_ends_when_it_is_undone_or_said_by_somebody_else() {
    let (world, ids) = World::start("HOLD", &["moved", "twice", "same"]).await;
    let [moved, twice, same] = ids.try_into().unwrap();
    let elsewhere = world.client.environment(&world.cluster, "elsewhere").await;
    world.server.drained(LIMIT).await;
    world.pat.pull().await;
    let before = world.files().await;
    let folder = |id: &str| world.pat.path(id).replace("/styrmindeployment.yaml", "");
    let there = |id: &str| format!("environments/{elsewhere}/s0/{id}");
    for id in [&moved, &twice] {
        world.pat.git(&["mv", &folder(id), &there(id)]).await;
    }
    world.pat.edit(&same, |document| paint(document, "blue"));
    let driver = before.keys().find(|path| path.starts_with("cluster/drivers/")).unwrap();
    world.pat.write(driver, "kind: Nothing\n");
    world.pat.push("Held").await;
    for id in [&moved, &twice, &same] {
        world.until(id, "HELD").await;
    }
    // Undone: nothing is held any more. Moved once more: everything goes back.
    let back = format!("environments/{}/s0/{moved}", world.environment);
    world.pat.git(&["mv", &there(&moved), &back]).await;
    world.pat.git(&["mv", &there(&twice), &format!("environments/{elsewhere}/{twice}")]).await;
    world.pat.write(driver, &before[driver]);
    world.pat.push("Undone, and again").await;
    let open = async |wanted: usize| {
        let query = "query($id: ID!) { cluster(id: $id) { edits(open: true) { nodes { kind path } } } }";
        eventually(&format!("{wanted} open edits"), LIMIT, async || {
            let found =
                world.client.ok(query, json!({ "id": world.cluster })).await["cluster"]["edits"]["nodes"].clone();
            if found.as_array().unwrap().len() == wanted { Ok(()) } else { Err(found) }
        })
        .await;
    };
    open(3).await;
    world.client.set_variable(&moved, "SIZE", "xl").await.unwrap();
    world.server.drained(LIMIT).await;
    world.is_whole(&moved).await;
    let edit = world.look(&twice).await["edits"]["nodes"][0].clone();
    world.decide(&edit, "RESTORE").await.unwrap();
    open(1).await;
    // Somebody asks for the same: adopting it sets that free.
    world.client.set_variable(&same, "COLOR", "blue").await.unwrap();
    let edit = world.look(&same).await["edits"]["nodes"][0].clone();
    assert_eq!(world.decide(&edit, "ADOPT").await.unwrap()["state"], "ADOPTED");
    let said = world.look(&same).await["edits"]["nodes"][0]["message"].clone();
    assert!(said.as_str().unwrap().ends_with("decided by Ann Example"), "{said}");
    world.server.drained(LIMIT).await;
    world.is_whole(&same).await;
    let after = world.files().await;
    assert!(
        !after.keys().any(|path| path.contains(&elsewhere) && path.ends_with("styrmindeployment.yaml")),
        "{after:?}"
    );
    let path = before.keys().find(|path| path.contains(&twice)).unwrap();
    assert_eq!(after.get(path), before.get(path));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_of_another_cluster_is_nobodys_here() {
    let (world, ids) = World::start("HOLD", &["here"]).await;
    let (other, _) = world.client.cluster(json!({ "name": "other", "edits": { "policy": "ADOPT" } })).await;
    let there = world.client.environment(&other, "e").await;
    let (theirs, _) = world.client.web(&there, "theirs").await;
    world.server.drained(LIMIT).await;
    let foreign = Person::of(world.server.hosted(&other).to_str().unwrap()).await;
    let path = format!("environments/{}/s0/{theirs}/styrmindeployment.yaml", world.environment);
    std::fs::create_dir_all(world.pat.work().join(&path).parent().unwrap()).unwrap();
    world.pat.write(&path, &foreign.read(&foreign.path(&theirs)));
    world.pat.edit(&ids[0], |document| paint(document, "blue"));
    world.pat.push("Copied from production").await;
    world.until(&ids[0], "HELD").await;
    assert_eq!(world.look(&theirs).await["edits"]["nodes"], json!([]));
    world.client.set_variable(&theirs, "SIZE", "xl").await.unwrap();
    world.server.drained(LIMIT).await;
    assert!(world.files().await.contains_key(&path), "it is somebody's file");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shallow_clone_is_as_good_as_a_whole_one() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    for number in 0..3 {
        world.client.set_variable(&ids[0], "N", &number.to_string()).await.unwrap();
        world.server.drained(LIMIT).await;
    }
    let hosted = world.server.hosted(&world.cluster);
    let before = git::commits(&hosted).await;
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}", hosted.display());
    git::git(folder.path(), &["clone", "--quiet", "--depth", "1", "-b", "main", &url, "work"]).await;
    let work = folder.path().join("work");
    let path = world.pat.path(&ids[0]);
    let text = std::fs::read_to_string(work.join(&path)).unwrap();
    std::fs::write(work.join(&path), text.replace("N\": \"2\"", "N\": \"9\"")).unwrap();
    git::git(&work, &["commit", "--quiet", "-am", "Nine"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    world.client.set_variable(&ids[0], "M", "1").await.unwrap();
    let found = world.until(&ids[0], "ADOPTED").await;
    assert_eq!(found["config"]["env_vars"], json!({ "M": "1", "N": "9" }));
    assert_eq!(found["edits"]["nodes"][0]["author"]["name"], "Pat");
    assert!(git::commits(&hosted).await > before + 1, "history is whole");
    git::git(&hosted, &["fsck", "--full", "--strict"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_formats_a_file_is_not_fought() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    let path = world.pat.path(&ids[0]);
    let text = format!("# formatted\n{}", world.pat.read(&path));
    world.pat.write(&path, &text);
    world.pat.push("Format").await;
    world.until(&ids[0], "NOTED").await;
    assert_eq!(world.files().await[&path], text);
    world.client.set_variable(&ids[0], "SIZE", "xl").await.unwrap();
    world.server.drained(LIMIT).await;
    world.is_whole(&ids[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_that_was_edited_together_with_its_deployment_is_put_back() {
    let (world, ids) = World::start("ADOPT", &["shop"]).await;
    let before = world.files().await;
    let driver = before.keys().find(|path| path.starts_with("cluster/drivers/")).unwrap();
    let chart = before.keys().find(|path| path.starts_with("charts/")).unwrap();
    world.pat.edit(&ids[0], |document| paint(document, "blue"));
    world.pat.write(driver, "kind: Nothing\n");
    world.pat.write(chart, "# mine\n");
    world.pat.push("Both").await;
    world.until(&ids[0], "ADOPTED").await;
    let after = world.files().await;
    assert_eq!((after.get(driver), after.get(chart)), (before.get(driver), before.get(chart)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_after_a_reading_finds_nothing_twice() {
    let (mut world, ids) = World::start("ADOPT", &["changed", "removed", "emptied"]).await;
    world.server.kill().await;
    let outside = Person::of(world.server.hosted(&world.cluster).to_str().unwrap()).await;
    outside.edit(&ids[0], |document| paint(document, "blue"));
    outside.git(&["rm", "--quiet", &outside.path(&ids[1])]).await;
    outside.write(&outside.path(&ids[2]), "");
    outside.push("Three").await;
    world.server.set("STYRMIN_FAULT", Some("after-reading"));
    world.server.launch();
    world.server.ended().await;
    world.server.set("STYRMIN_FAULT", None);
    world.server.up().await;
    for (id, state) in ids.iter().zip(["ADOPTED", "WAITING", "RESTORED"]) {
        let found = world.until(id, state).await;
        assert_eq!(found["edits"]["nodes"].as_array().unwrap().len(), 1, "{found:#}");
    }
    assert_eq!(world.look(&ids[0]).await["newestInstance"]["sequence"], 2);
    world.is_whole(&ids[0]).await;
    world.is_whole(&ids[2]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewound_branch_is_taken_as_it_is() {
    let (world, ids) = World::start("ADOPT", &["shop", "late"]).await;
    let [shop, late] = ids.try_into().unwrap();
    let hosted = world.server.hosted(&world.cluster);
    let before = world.pat.git(&["rev-parse", "HEAD"]).await.trim().to_owned();
    world.client.set_variable(&shop, "COLOR", "blue").await.unwrap();
    world.server.drained(LIMIT).await;
    git::git(&hosted, &["update-ref", "refs/heads/main", &before]).await;
    // Nobody told the server; it looks by itself.
    world.client.set_variable(&late, "SIZE", "xl").await.unwrap();
    let found = world.until(&shop, "ADOPTED").await;
    assert_eq!((&found["edits"]["nodes"][0]["kind"], &found["config"]), (&json!("REVERTED"), &json!({})));
    world.is_whole(&shop).await;
    world.is_whole(&late).await;
    let query = "query($id: ID!) { cluster(id: $id) { edits { nodes { kind state message } } } }";
    let edits = world.client.ok(query, json!({ "id": world.cluster })).await["cluster"]["edits"]["nodes"].clone();
    let noted = edits.as_array().unwrap().iter().find(|edit| edit["kind"] == "REWOUND").expect("an event");
    assert_eq!(noted["state"], "NOTED");
    assert!(noted["message"].as_str().unwrap().contains("taken as it is"), "{noted}");
    // The branch itself is never made anew from nothing.
    git::git(&hosted, &["update-ref", "-d", "refs/heads/main"]).await;
    let task = world.client.set_variable(&shop, "COLOR", "green").await.unwrap().unwrap();
    eventually("the task says what is wrong", LIMIT, async || {
        let query = "query($id: ID!) { task(id: $id) { steps { message } } }";
        let step = world.client.ok(query, json!({ "id": task })).await["task"]["steps"][0].clone();
        let is_said =
            step["message"].as_str().is_some_and(|said| said.contains("the branch \"main\" is not there any more"));
        if is_said { Ok(()) } else { Err(step) }
    })
    .await;
    assert!(!git::succeeds(&hosted, &["rev-parse", "--verify", "--quiet", "main"]).await);
}
