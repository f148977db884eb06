//! The server is killed at every named point between the transaction and the recorded push, and at
//! random, while a person pushes to the same branch: what remains is what an undisturbed run gives.

use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use styrmin_client::{Client, ClientError};
use styrmin_server::faults;
use styrmin_tests::git::{self, Person};
use styrmin_tests::server::{Api as _, Server};
use tokio::sync::Mutex;

/// A server with a cluster in a bare repository, and a client that survives its deaths.
struct Scene {
    server: Arc<Mutex<Server>>,
    client: Client,
    repository: PathBuf,
    environment: String,
    folder: PathBuf,
}

impl Scene {
    async fn start() -> Self {
        let mut server = Server::new(None);
        server.up().await;
        let folder = server.folder.path().to_owned();
        let repository = git::bare(&folder).await;
        let client = server.client();
        let (cluster, _) = client.cluster(json!({ "name": "c", "git": { "url": repository.to_str() } })).await;
        let environment = client.environment(&cluster, "e").await;
        server.drained(Duration::from_secs(30)).await;
        Self { server: Arc::new(Mutex::new(server)), client, repository, environment, folder }
    }

    /// Starts the server with a fault, or again without one.
    async fn restart(&self, fault: Option<&str>) {
        let mut server = self.server.lock().await;
        server.kill().await;
        server.set("STYRMIN_FAULT", fault);
        server.up().await;
    }

    /// Calls until the server answers, starting it again when it has died.
    async fn insist<T>(&self, call: impl AsyncFn() -> Result<T, ClientError>) -> Result<T, ClientError> {
        for _ in 0..200 {
            match call().await {
                Err(ClientError::Http { .. }) => {
                    let mut server = self.server.lock().await;
                    if !server.runs() {
                        server.set("STYRMIN_FAULT", None);
                        server.up().await;
                    }
                }
                other => return other,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the server does not come back");
    }

    /// Creates a deployment; one that an unanswered call created already is found by its name.
    async fn create(&self, name: &str) -> String {
        let input = json!({ "environment": self.environment, "name": name, "driver": "web-application", "applicationVersion": "1", "parameters": { "image": "nginx" } });
        match self.insist(async || self.client.create(input.clone()).await).await {
            Ok((id, _)) => id,
            Err(error) => {
                assert!(error.to_string().contains("is taken"), "{error}");
                let query = "{ deployments(first: 500) { nodes { id name lifecycle } } }";
                let data = self.insist(async || self.client.execute(query, json!({})).await).await.unwrap();
                let rows = data["deployments"]["nodes"].as_array().unwrap().clone();
                let row = rows.iter().find(|row| row["name"] == name && row["lifecycle"] != "DELETING").unwrap();
                row["id"].as_str().unwrap().to_owned()
            }
        }
    }

    async fn set(&self, deployment: &str, name: &str, value: &str) {
        self.insist(async || self.client.set_variable(deployment, name, value).await).await.unwrap();
    }

    async fn delete(&self, deployment: &str) {
        self.insist(async || self.client.delete(deployment).await).await.unwrap();
    }

    /// The work of every run, in three rounds of the writer at least: three deployments come and
    /// change, one of them goes and comes again.
    async fn work(&self) {
        let (one, two, three) = tokio::join!(self.create("one"), self.create("two"), self.create("three"));
        self.settle().await;
        let first = async {
            for number in 0..4 {
                self.set(&one, &format!("V{number}"), "x").await;
            }
        };
        let second = async {
            self.set(&two, "A", "1").await;
            self.set(&two, "A", "2").await;
        };
        tokio::join!(first, second, self.set(&three, "A", "1"));
        self.settle().await;
        let again = async {
            self.delete(&three).await;
            self.create("three").await;
        };
        tokio::join!(again, self.set(&one, "V0", "y"));
    }

    /// Waits until everything is pushed, the server being alive or not.
    async fn settle(&self) {
        let mut server = self.server.lock().await;
        for _ in 0..100 {
            if !server.runs() {
                server.set("STYRMIN_FAULT", None);
                server.up().await;
            }
            let drained = tokio::time::timeout(Duration::from_secs(2), server.drained(Duration::from_secs(60))).await;
            if drained.is_ok() {
                return;
            }
        }
        panic!("the outbox does not drain: {}", server.log());
    }

    /// Our files at the tip with ids replaced by names, without what differs from run to run.
    async fn tree(&self) -> BTreeMap<String, String> {
        let query = "{ deployments(first: 500) { nodes { id name lifecycle newestInstance { id } } } }";
        let data = self.client.ok(query, json!({})).await;
        let mut names: HashMap<String, String> = HashMap::from([(self.environment.clone(), "ENV".to_owned())]);
        for row in data["deployments"]["nodes"].as_array().unwrap() {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            names.insert(text(&row["id"]), format!("{}-{}", text(&row["name"]), text(&row["lifecycle"])));
            names.insert(text(&row["newestInstance"]["id"]), "NEWEST".to_owned());
        }
        let replace = |text: &str| names.iter().fold(text.to_owned(), |text, (id, name)| text.replace(id, name));
        let clusters = self.client.ok("{ clusters { nodes { id } } }", json!({})).await;
        let cluster = clusters["clusters"]["nodes"][0]["id"].as_str().unwrap().to_owned();
        git::files(&self.repository)
            .await
            .into_iter()
            .filter(|(path, _)| path != "person.txt" && !path.starts_with("flux/"))
            .map(|(path, text)| (replace(&path), replace(&text).replace(&cluster, "CLUSTER")))
            .collect()
    }

    /// The trailers of the whole history name every instance at most once, the newest of each
    /// deployment exactly once, and the person's files are as the person left them.
    async fn check(&self, person: Option<usize>) {
        let mut seen: HashMap<String, usize> = HashMap::new();
        for named in git::named(&self.repository).await {
            *seen.entry(named.instance).or_default() += 1;
        }
        assert!(seen.values().all(|count| *count == 1), "{seen:?}");
        let query = "{ deployments(first: 500) { nodes { lifecycle newestInstance { id state } instances(first: 50) { nodes { id state } } } } }";
        for row in self.client.ok(query, json!({})).await["deployments"]["nodes"].as_array().unwrap() {
            let times = seen.get(row["newestInstance"]["id"].as_str().unwrap()).copied().unwrap_or_default();
            // A deployment that went before it was ever committed needs no commit.
            let nothing_there = row["lifecycle"] == "DELETING"
                && row["instances"]["nodes"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .all(|instance| !seen.contains_key(instance["id"].as_str().unwrap()));
            assert!(times == 1 || nothing_there, "{row}");
            assert_eq!(row["newestInstance"]["state"], "COMMITTED", "{row}");
            for instance in row["instances"]["nodes"].as_array().unwrap() {
                let committed = seen.contains_key(instance["id"].as_str().unwrap());
                let expected =
                    if committed || nothing_there { ["COMMITTED", "SUPERSEDED"] } else { ["SUPERSEDED", "SUPERSEDED"] };
                assert!(expected.contains(&instance["state"].as_str().unwrap()), "{row}");
            }
        }
        let files = git::files(&self.repository).await;
        assert_eq!(files["NOTES.md"], "A person's notes.\n");
        if let Some(pushed) = person {
            assert_eq!(files["person.txt"], format!("{pushed}\n"));
        }
    }

    async fn person(&self) -> Person {
        Person::start(Path::new(&self.folder), &self.repository, Duration::from_millis(150)).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_at_any_named_point_leaves_what_an_undisturbed_run_gives() {
    let undisturbed = Scene::start().await;
    undisturbed.work().await;
    undisturbed.settle().await;
    undisturbed.check(None).await;
    let expected = undisturbed.tree().await;
    assert_eq!(expected.keys().filter(|path| path.ends_with("styrmindeployment.yaml")).count(), 3);

    let runs = faults::POINTS.iter().flat_map(|point| [1, 2].map(|pass| format!("{point}:{pass}")));
    for fault in runs {
        let scene = Scene::start().await;
        let person = scene.person().await;
        scene.restart(Some(&fault)).await;
        scene.work().await;
        scene.settle().await;
        let pushed = person.finish().await;
        scene.settle().await;
        // The point was passed that often, and the server died there.
        let starts = scene.server.lock().await.log().matches(" listening ").count();
        assert!(starts >= 3, "{fault}: the server was not killed");
        scene.check(Some(pushed)).await;
        assert_eq!(scene.tree().await, expected, "{fault}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_random_kills_lose_nothing_and_repeat_nothing() {
    const PATCHES: usize = 40;
    let run = async |scene: &Scene, pause: Duration| {
        let worker = async |name: &str| {
            let id = scene.create(name).await;
            for number in 0..PATCHES {
                scene.set(&id, &format!("V{}", number % 7), &number.to_string()).await;
                tokio::time::sleep(pause).await;
            }
            if name == "c" {
                scene.delete(&id).await;
                scene.create(name).await;
            }
        };
        tokio::join!(worker("a"), worker("b"), worker("c"));
    };
    let undisturbed = Scene::start().await;
    run(&undisturbed, Duration::ZERO).await;
    undisturbed.settle().await;
    let expected = undisturbed.tree().await;

    let scene = Scene::start().await;
    let person = scene.person().await;
    let server = Arc::clone(&scene.server);
    let killer = tokio::spawn(async move {
        for _ in 0..50 {
            tokio::time::sleep(Duration::from_millis(rand::random_range(10..400))).await;
            let mut server = server.lock().await;
            server.kill().await;
            server.up().await;
        }
    });
    run(&scene, Duration::from_millis(200)).await;
    killer.await.unwrap();
    scene.settle().await;
    let pushed = person.finish().await;
    scene.settle().await;
    assert!(pushed > 0);
    scene.check(Some(pushed)).await;
    assert_eq!(scene.tree().await, expected);
}
