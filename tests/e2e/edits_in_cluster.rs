//! What people change in a repository by hand, with real Flux and the operator: every kind of edit under every policy.
//! Whatever it is, no application stops that nobody ended.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use styrmin_tests::people::Person;
use styrmin_tests::server::Api as _;
use styrmin_tests::world::{LIMIT, World};
use styrmin_tests::{eventually, git};

/// Deployments that run, each for one kind of edit.
struct Scene {
    world: World,
    pat: Person,
    ids: BTreeMap<&'static str, String>,
    /// UIDs of the application namespaces: another one is another application.
    namespaces: BTreeMap<&'static str, Value>,
    elsewhere: String,
}

const KINDS: [&str; 6] = ["changed", "reverted", "removed", "moved", "renamed", "emptied"];

impl Scene {
    async fn start(policy: &str) -> Self {
        let world = World::start().await;
        let client = world.client();
        world.rules(policy).await;
        let elsewhere = client.environment(&world.cluster, "elsewhere").await;
        let mut ids = BTreeMap::new();
        let mut tasks = Vec::new();
        for name in KINDS {
            let (id, task) = client.web(&world.environment, name).await;
            ids.insert(name, id);
            tasks.push(task);
        }
        for task in &tasks {
            assert_eq!(world.until_ended(task).await["state"], "SUCCEEDED");
        }
        let task = client.set_variable(&ids["reverted"], "COLOR", "blue").await.unwrap().unwrap();
        assert_eq!(world.until_ended(&task).await["state"], "SUCCEEDED");
        let mut namespaces = BTreeMap::new();
        for name in KINDS {
            namespaces.insert(name, namespace(&world, &ids[name]).await);
        }
        let pat = Person::of(world.repository().to_str().unwrap()).await;
        Self { world, pat, ids, namespaces, elsewhere }
    }

    /// All kinds at once, in one commit.
    async fn edit_everything(&self) -> String {
        let (pat, ids) = (&self.pat, &self.ids);
        pat.pull().await;
        let path = |name: &str| pat.path(&ids[name]);
        pat.edit(&ids["changed"], paint_red);
        pat.git(&["checkout", "--quiet", "HEAD~1", "--", &path("reverted")]).await;
        let folder = |name: &str| path(name).replace("/styrmindeployment.yaml", "");
        pat.git(&["rm", "-r", "--quiet", &folder("removed")]).await;
        pat.git(&["mv", &folder("moved"), &format!("environments/{}/s0/{}", self.elsewhere, ids["moved"])]).await;
        pat.git(&["mv", &path("renamed"), &path("renamed").replace("styrmindeployment", "app")]).await;
        pat.write(&path("emptied"), "");
        let commit = pat.push("All at once").await;
        self.world.fetch().await;
        commit
    }

    async fn look(&self, name: &str) -> Value {
        let query = "query($id: ID!) { deployment(id: $id) { state config newestInstance { sequence author { name } } \
            status { phase deleting conditions { reason } } \
            edits { nodes { id kind state message commit } } timeline { nodes { kind title message } } } }";
        self.world.client().ok(query, json!({ "id": self.ids[name] })).await["deployment"].clone()
    }

    /// Waits until the newest edit of a deployment is this.
    async fn until_edit(&self, name: &str, state: &str) -> Value {
        eventually(&format!("the edit of {name} is {state}"), LIMIT, async || {
            let found = self.look(name).await;
            if found["edits"]["nodes"][0]["state"] == state { Ok(found) } else { Err(found["edits"].clone()) }
        })
        .await
    }

    async fn decide(&self, name: &str, decision: &str) {
        let query = "mutation($id: ID!, $d: EditDecision!) { decideEdit(id: $id, decision: $d) { state } }";
        let edit = self.look(name).await["edits"]["nodes"][0]["id"].clone();
        self.world.client().ok(query, json!({ "id": edit, "d": decision })).await;
    }

    /// Waits until the object in the cluster has this colour, or none, and its rollout is done.
    async fn until_color(&self, name: &str, color: Option<&str>) {
        let (namespace, object) = self.world.object(&self.ids[name]);
        let key = ["styrmin.io/v1alpha1", "StyrminDeployment", namespace.as_str(), object.as_str()];
        let is = |found: Option<&Value>| {
            found.is_some_and(|found| {
                let is = found["spec"]["context"]["components"]["web"]["env_vars"]["COLOR"].as_str();
                is == color && found["status"]["phase"] == "Ready" && found["metadata"]["deletionTimestamp"].is_null()
            })
        };
        self.world.plane.until(&key, LIMIT, is).await;
    }

    /// Waits until people see that an object goes without a reason.
    async fn until_unconfirmed(&self, name: &str) {
        eventually(&format!("{name} is not confirmed"), LIMIT, async || {
            let found = self.look(name).await;
            let all = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
            if all.iter().any(|one| one["reason"] == "NotConfirmed") { Ok(()) } else { Err(found["status"].clone()) }
        })
        .await;
    }

    /// No application was stopped, and none is another one.
    async fn nothing_stopped(&self, but: &[&str]) {
        for name in KINDS.iter().filter(|name| !but.contains(name)) {
            assert_eq!(namespace(&self.world, &self.ids[name]).await, self.namespaces[name], "{name}");
            let (_, object) = self.world.object(&self.ids[name]);
            let pods = ["-n", &object, "get", "pods", "-o", "jsonpath={.items[*].status.phase}"];
            let pods = self.world.plane.kubectl(&pods).await;
            assert!(pods.contains("Running"), "{name}: {pods}");
        }
    }

    /// A file that is broken blocks its shard: another deployment's change waits, and says for what.
    async fn break_a_file(&self) -> String {
        self.pat.pull().await;
        let path = self.pat.path(&self.ids["changed"]);
        self.pat.write(&path, &self.pat.read(&path).replacen("apiVersion:", "piVersion:", 1));
        let commit = self.pat.push("Oops").await;
        self.world.fetch().await;
        commit
    }

    /// The branch goes back to before the last change of a deployment.
    async fn rewind(&self) {
        let task = self.world.client().set_variable(&self.ids["renamed"], "SIZE", "xl").await.unwrap().unwrap();
        assert_eq!(self.world.until_ended(&task).await["state"], "SUCCEEDED");
        git::git(&self.world.repository(), &["update-ref", "refs/heads/main", "main~1"]).await;
        self.world.fetch().await;
    }

    async fn config(&self, name: &str) -> Value {
        self.look(name).await["config"].clone()
    }

    /// The newest change of a deployment runs.
    async fn runs(&self, name: &str) {
        self.world.until_state(&self.ids[name], "RUNNING").await;
    }
}

async fn namespace(world: &World, id: &str) -> Value {
    let found = world.plane.get(&["v1", "Namespace", "", &world.object(id).1]).await;
    found.unwrap_or_else(|| panic!("no namespace of {id}"))["metadata"]["uid"].clone()
}

fn paint_red(document: &mut Value) {
    document["spec"]["context"]["instance"]["config"]["env_vars"]["COLOR"] = json!("red");
    document["spec"]["context"]["components"]["web"]["env_vars"]["COLOR"] = json!("red");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_be_said_is_adopted_and_the_rest_put_back() {
    let scene = Scene::start("ADOPT").await;
    let commit = scene.edit_everything().await;
    for (name, kind, state) in [
        ("changed", "CHANGED", "ADOPTED"),
        ("reverted", "REVERTED", "ADOPTED"),
        ("removed", "REMOVED", "WAITING"),
        ("moved", "MOVED", "RESTORED"),
        ("renamed", "MOVED", "RESTORED"),
        ("emptied", "EMPTIED", "RESTORED"),
    ] {
        let found = scene.until_edit(name, state).await;
        let edit = &found["edits"]["nodes"][0];
        assert_eq!((&edit["kind"], &edit["commit"]), (&json!(kind), &json!(commit)), "{name}");
        let told = found["timeline"]["nodes"].as_array().unwrap();
        assert!(
            told.iter().any(|entry| entry["message"].as_str().is_some_and(|said| said.contains("Pat"))),
            "{told:?}"
        );
    }
    for (name, color) in
        [("changed", Some("red")), ("reverted", None), ("moved", None), ("renamed", None), ("emptied", None)]
    {
        scene.until_color(name, color).await;
        scene.runs(name).await;
    }
    assert_eq!(scene.look("reverted").await["newestInstance"]["author"]["name"], "Pat");
    scene.until_unconfirmed("removed").await;
    scene.nothing_stopped(&[]).await;
    scene.decide("removed", "ADOPT").await;
    scene.world.until_state(&scene.ids["removed"], "DELETED").await;
    scene.nothing_stopped(&["removed"]).await;

    scene.break_a_file().await;
    let found = scene.until_edit("changed", "RESTORED").await;
    assert_eq!(found["edits"]["nodes"][0]["kind"], "BROKEN");
    scene.rewind().await;
    let found = scene.until_edit("renamed", "ADOPTED").await;
    assert_eq!(found["edits"]["nodes"][0]["kind"], "REVERTED");
    scene.runs("renamed").await;
    assert_eq!(scene.config("renamed").await, json!({}));
    scene.nothing_stopped(&["removed"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_put_back() {
    let scene = Scene::start("RESTORE").await;
    scene.edit_everything().await;
    for name in KINDS {
        scene.until_edit(name, "RESTORED").await;
    }
    for name in KINDS {
        scene.until_color(name, (name == "reverted").then_some("blue")).await;
        scene.runs(name).await;
    }
    scene.nothing_stopped(&[]).await;
    scene.break_a_file().await;
    scene.until_edit("changed", "RESTORED").await;
    scene.rewind().await;
    scene.until_edit("renamed", "RESTORED").await;
    assert_eq!(scene.config("renamed").await["env_vars"], json!({ "SIZE": "xl" }));
    let task = scene.world.client().set_variable(&scene.ids["changed"], "COLOR", "green").await.unwrap().unwrap();
    assert_eq!(scene.world.until_ended(&task).await["state"], "SUCCEEDED");
    scene.until_color("changed", Some("green")).await;
    scene.nothing_stopped(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_held_until_somebody_decides() {
    let scene = Scene::start("HOLD").await;
    scene.edit_everything().await;
    for name in KINDS {
        let found = scene.until_edit(name, "HELD").await;
        assert_eq!(found["newestInstance"]["sequence"], if name == "reverted" { 2 } else { 1 });
    }
    // What Flux applied runs.
    scene.until_color("changed", Some("red")).await;
    scene.until_color("reverted", None).await;
    for name in ["removed", "emptied"] {
        scene.until_unconfirmed(name).await;
    }
    scene.nothing_stopped(&[]).await;
    scene.decide("changed", "ADOPT").await;
    scene.decide("reverted", "ADOPT").await;
    for name in ["removed", "moved", "renamed", "emptied"] {
        scene.decide(name, "RESTORE").await;
    }
    for (name, color) in KINDS.map(|name| (name, (name == "changed").then_some("red"))) {
        scene.until_color(name, color).await;
        scene.runs(name).await;
    }
    scene.nothing_stopped(&[]).await;

    // A broken file holds up its whole shard, and people see by what.
    scene.break_a_file().await;
    scene.until_edit("changed", "HELD").await;
    let task = scene.world.client().set_variable(&scene.ids["moved"], "SIZE", "xl").await.unwrap().unwrap();
    let query = "query($id: ID!) { task(id: $id) { steps { message } } }";
    eventually("the task says what holds it up", LIMIT, async || {
        let found = scene.world.client().ok(query, json!({ "id": task })).await["task"].clone();
        let said = found.to_string();
        if said.contains("Kustomization") && said.contains("apiVersion") { Ok(()) } else { Err(found) }
    })
    .await;
    scene.decide("changed", "RESTORE").await;
    assert_eq!(scene.world.until_ended(&task).await["state"], "SUCCEEDED");
    scene.rewind().await;
    scene.until_edit("renamed", "HELD").await;
    scene.decide("renamed", "ADOPT").await;
    scene.until_edit("renamed", "ADOPTED").await;
    scene.runs("renamed").await;
    assert_eq!(scene.config("renamed").await, json!({}));
    scene.nothing_stopped(&[]).await;
}
