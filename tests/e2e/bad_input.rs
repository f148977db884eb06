//! Bad input: each gets an error that names object, field and remedy, and leaves nothing half done.

use serde_json::{Value, json};
use std::time::Duration;
use styrmin_client::{Client, ClientError};
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git};

struct Scene {
    server: Server,
    client: Client,
    cluster: String,
    agent_token: String,
    environment: String,
}

impl Scene {
    async fn start() -> Self {
        let server = Server::start().await;
        let client = server.client();
        let (cluster, agent_token) =
            client.cluster(json!({ "name": "c", "config": { "fqdn_suffix": "apps.example.com" } })).await;
        let environment = client.environment(&cluster, "e").await;
        server.drained(Duration::from_secs(30)).await;
        Self { server, client, cluster, agent_token, environment }
    }

    fn web(&self, changes: Value) -> Value {
        let mut input = json!({ "environment": self.environment, "name": "shop", "driver": "web-application", "applicationVersion": "1", "parameters": { "image": "nginx" } });
        for (key, value) in changes.as_object().unwrap() {
            input[key] = value.clone();
        }
        input
    }

    async fn refused(&self, changes: Value) -> String {
        match self.client.create(self.web(changes.clone())).await {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{changes} was accepted"),
        }
    }

    /// Nothing of what was refused is anywhere.
    async fn nothing_happened(&self) {
        self.server.drained(Duration::from_secs(10)).await;
        let query = "{ deployments { nodes { id } } tasks { nodes { id } } }";
        let data = self.client.ok(query, json!({})).await;
        assert_eq!(data, json!({ "deployments": { "nodes": [] }, "tasks": { "nodes": [] } }));
        let files = git::files(&self.server.hosted(&self.cluster)).await;
        assert!(
            !files.keys().any(|path| path.contains("styrmindeployment") || path.starts_with("charts/")),
            "{files:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deployment_that_cannot_be_is_refused_with_object_field_and_remedy() {
    let scene = Scene::start().await;
    let long = "a".repeat(64);
    let deep = "x".repeat(800 << 10);
    let cases = [
        (json!({ "driver": "nope" }), vec!["deployment \"shop\": driver: ", "postgresql, web-application"]),
        (json!({ "driverVersion": "9.9.9" }), vec!["deployment \"shop\": driver_version: ", "loaded are: 1.0.0"]),
        (
            json!({ "driver": "postgresql", "applicationVersion": "12" }),
            vec!["deployment \"shop\": application_version: ", "1.0.0 supports >=13"],
        ),
        (
            json!({ "parameters": { "image": 3 } }),
            vec!["deployment \"shop\": parameters.image: must be of kind string"],
        ),
        (
            json!({ "parameters": { "image": "nginx", "container_port": 70000 } }),
            vec!["deployment \"shop\": parameters.container_port: ", "65535"],
        ),
        (
            json!({ "parameters": { "image": "nginx", "prot": 1 } }),
            vec!["deployment \"shop\": parameters.prot: ", "has no such parameter", "container_port"],
        ),
        (json!({ "parameters": {} }), vec!["deployment \"shop\": parameters.image: is required"]),
        (json!({ "name": "Shop" }), vec!["deployment \"Shop\": name: ", "lower-case"]),
        (json!({ "name": long }), vec!["name: ", "has 64 characters, at most 63"]),
        (json!({ "name": "b".repeat(60) }), vec!["services.web: its hostname is not possible: ", "at most 63"]),
        (
            json!({ "applicationVersion": "v".repeat(64) }),
            vec!["application_version: ", "63 characters of a label value"],
        ),
        (
            json!({ "config": { "fqdn_sufix": "x" } }),
            vec!["deployment \"shop\": config: 'fqdn_sufix' is not a setting"],
        ),
        (
            json!({ "config": { "components": { "wbe": { "replicas": 1 } } } }),
            vec!["config.components.wbe: ", "it has web"],
        ),
        (
            json!({ "config": { "env_vars": { "BIG": deep } } }),
            vec!["deployment \"shop\": config.env_vars: the resolved context has ", "at most 786432"],
        ),
        (
            json!({ "config": { "env_vars": { "NEL": "a\u{85}b" } } }),
            vec!["components.web.env_vars.NEL: contains the character U+0085", "remove it"],
        ),
        (
            json!({ "config": { "dedicated_ingress": { "x": { "<<": 1 } } } }),
            vec!["dedicated_ingress.x.<<: has a key \"<<\"", "choose another"],
        ),
        (json!({ "environment": "nowhere12345" }), vec!["environment \"nowhere12345\": does not exist"]),
        (json!({ "environment": "../../etc" }), vec!["environment \"../../etc\": does not exist"]),
        (
            json!({ "driver": "postgresql", "applicationVersion": "17", "parameters": {} }),
            vec!["parameters.password: is required"],
        ),
        (
            json!({ "driver": "postgresql", "applicationVersion": "17", "parameters": { "password": "hunter2" } }),
            vec!["parameters.password: "],
        ),
        (
            json!({ "driver": "postgresql", "applicationVersion": "17", "parameters": { "password": "hunter2-hunter2" } }),
            vec!["parameters.password: ", "no age recipient", "ageRecipients"],
        ),
    ];
    for (changes, expected) in cases {
        let message = scene.refused(changes).await;
        for part in expected {
            assert!(message.contains(part), "{part:?} is missing in {message}");
        }
        assert!(!message.contains("hunter2"), "{message}");
    }
    let error = scene
        .client
        .execute("mutation { updateDeployment(id: \"abcdefghijkl\", input: {}) { task { id } } }", json!({}))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("deployment \"abcdefghijkl\": does not exist"), "{error}");
    scene.nothing_happened().await;
    assert!(!scene.server.log().contains("hunter2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn clusters_and_environments_that_cannot_be_are_refused() {
    let scene = Scene::start().await;
    let query = "mutation($input: CreateClusterInput!) { createCluster(input: $input) { cluster { id } } }";
    let repository = git::bare(scene.server.folder.path()).await;
    let (_, _) =
        scene.client.cluster(json!({ "name": "first", "git": { "url": repository, "path": "clusters/first" } })).await;
    let cases = [
        (json!({ "name": "c" }), "cluster \"c\": name: is taken"),
        (json!({ "name": "C" }), "cluster \"C\": name: "),
        (
            json!({ "name": "d", "git": { "url": "https://me:pw@host/r" } }),
            "cluster \"d\": git.url: contains credentials",
        ),
        (json!({ "name": "d", "git": { "url": "ext::sh -c id" } }), "cluster \"d\": git.url: is not a Git URL"),
        (json!({ "name": "d", "git": { "url": "https://host/r", "branch": "a..b" } }), "cluster \"d\": git.branch: "),
        (json!({ "name": "d", "git": { "url": "https://host/r", "path": "../x" } }), "cluster \"d\": git.path: "),
        (json!({ "name": "d", "git": { "url": "https://host/r", "username": "x" } }), "cluster \"d\": git.password: "),
        (json!({ "name": "d", "ageRecipient": "age1nope" }), "cluster \"d\": age_recipients[0]: "),
        (json!({ "name": "d", "config": { "ip_whitelist": ["x"] } }), "cluster \"d\": config.ip_whitelist[0]: "),
        (
            json!({ "name": "d", "git": { "url": repository, "path": "clusters" } }),
            "cluster \"d\": git.path: \"clusters\" overlaps with the folder \"clusters/first\" of cluster \"first\"",
        ),
        (
            json!({ "name": "d", "git": { "url": format!("file://{}", repository.display()), "path": "clusters/first/x" } }),
            "overlaps",
        ),
    ];
    for (input, expected) in cases {
        let message = scene.client.execute(query, json!({ "input": input })).await.unwrap_err().to_string();
        assert!(message.contains(expected) && !message.contains("pw"), "{expected:?} is missing in {message}");
    }
    let query = "mutation($cluster: ID!, $name: String!) { createEnvironment(cluster: $cluster, name: $name) { id } }";
    for (cluster, name, expected) in [
        (scene.cluster.as_str(), "e", "environment \"e\": name: is taken in cluster \"c\""),
        (scene.cluster.as_str(), "", "environment \"\": name: "),
        ("nowhere", "x", "cluster \"nowhere\": does not exist"),
    ] {
        let message =
            scene.client.execute(query, json!({ "cluster": cluster, "name": name })).await.unwrap_err().to_string();
        assert!(message.contains(expected), "{expected:?} is missing in {message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_gets_in_with_a_wrong_or_foreign_token() {
    let scene = Scene::start().await;
    let address = scene.server.address();
    let http = styrmin_tests::http();
    let body = json!({ "query": "{ clusters { nodes { id } } }" }).to_string();
    let post = |token: Option<&str>| {
        let request = http.post(format!("{address}/graphql")).body(body.clone());
        match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
        .send()
    };
    for token in [None, Some("wrong"), Some("styrmin_admin_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")] {
        let answer = post(token).await.unwrap();
        assert_eq!(answer.status(), 401);
        assert!(answer.text().await.unwrap().contains("token"));
        for path in ["/metrics", "/git/c.git/info/refs?service=git-upload-pack"] {
            let request = http.get(format!("{address}{path}"));
            let request = if let Some(token) = token { request.bearer_auth(token) } else { request };
            assert_eq!(request.send().await.unwrap().status(), 401, "{path}");
        }
    }
    // An agent speaks for its own cluster only, and changes nothing.
    let agent = Client::new(&address, &scene.agent_token).unwrap();
    let viewer = agent.ok("{ viewer { kind cluster } }", json!({})).await;
    assert_eq!(viewer["viewer"], json!({ "kind": "agent", "cluster": scene.cluster }));
    for query in [
        "{ clusters { nodes { id } } }",
        "{ deployments { nodes { id } } }",
        "{ tasks { nodes { id } } }",
        "{ drivers { name } }",
        "mutation { createCluster(input: { name: \"x\" }) { agentToken } }",
        "mutation { createAdministratorToken(name: \"x\", email: \"x@x\") { token } }",
    ] {
        let error = agent.execute(query, json!({})).await.unwrap_err();
        assert!(
            matches!(&error, ClientError::Refused { code: Some(code), .. } if code == "FORBIDDEN"),
            "{query}: {error}"
        );
    }
    let (_, other) = scene.client.cluster(json!({ "name": "other" })).await;
    for (token, path, status) in [
        (&scene.agent_token, "/git/c.git/info/refs?service=git-upload-pack", 200),
        (&scene.agent_token, "/git/c.git/info/refs?service=git-receive-pack", 403),
        (&other, "/git/c.git/info/refs?service=git-upload-pack", 403),
        (&other, "/git/nowhere.git/info/refs?service=git-upload-pack", 403),
        (&scene.server.token(), "/git/c.git/info/refs?service=git-receive-pack", 200),
        (&scene.server.token(), "/git/nowhere.git/info/refs?service=git-upload-pack", 404),
        (&scene.server.token(), "/git/c.git/config", 404),
        (&scene.server.token(), "/git/..%2F..%2Fserver.key/info/refs?service=git-upload-pack", 404),
        (&other, "/metrics", 403),
    ] {
        let answer = http.get(format!("{address}{path}")).bearer_auth(token).send().await.unwrap();
        assert_eq!(answer.status(), status, "{path}");
    }
    let log = scene.server.log();
    assert!(!log.contains(&scene.agent_token) && !log.contains(&scene.server.token()));
}

#[tokio::test(flavor = "multi_thread")]
async fn people_and_agents_use_the_hosted_repository_with_git_itself() {
    let scene = Scene::start().await;
    let port = scene.server.address().replace("http://", "");
    let folder = scene.server.folder.path();
    let url = |token: &str| format!("http://any:{token}@{port}/git/c.git");
    let work = folder.join("work");
    git::git(folder, &["clone", "--quiet", "-b", "main", &url(&scene.server.token()), work.to_str().unwrap()]).await;
    std::fs::write(work.join("mine.txt"), "mine\n").unwrap();
    git::git(&work, &["add", "-A"]).await;
    git::git(&work, &["commit", "--quiet", "-m", "Mine"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    assert!(!git::succeeds(&work, &["push", "--quiet", "--force", "origin", "HEAD~1:main"]).await, "history stays");
    assert!(!git::succeeds(&work, &["push", "--quiet", "origin", ":main"]).await, "history stays");
    let (deployment, _) = scene.client.web(&scene.environment, "shop").await;
    scene.server.drained(Duration::from_secs(30)).await;
    let reader = folder.join("reader");
    git::git(folder, &["clone", "--quiet", "-b", "main", &url(&scene.agent_token), reader.to_str().unwrap()]).await;
    assert!(reader.join("mine.txt").is_file());
    assert!(
        reader.join(format!("environments/{}/s0/{deployment}/styrmindeployment.yaml", scene.environment)).is_file()
    );
    git::git(&reader, &["commit", "--quiet", "--allow-empty", "-m", "Agent"]).await;
    assert!(!git::succeeds(&reader, &["push", "--quiet", "origin", "HEAD:main"]).await, "an agent cannot push");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_or_too_deep_is_refused() {
    let scene = Scene::start().await;
    let http = styrmin_tests::http();
    let post = |body: Vec<u8>| {
        http.post(format!("{}/graphql", scene.server.address())).bearer_auth(scene.server.token()).body(body).send()
    };
    match post(vec![b' '; 50 << 20]).await {
        Ok(answer) => {
            assert_eq!(answer.status(), 413);
            assert!(answer.text().await.unwrap().contains("larger than 4194304 bytes"));
        }
        // The server may close the connection before everything was sent.
        Err(error) => assert!(error.is_request() || error.is_body(), "{error:?}"),
    }
    let deep = format!(
        "{{ clusters {{ nodes {{ {} id {} }} }} }}",
        "environments { nodes { cluster { ".repeat(30),
        "} } }".repeat(30)
    );
    let wide = format!(
        "{{ {} }}",
        (0..3000)
            .map(|n| format!("a{n}: clusters(first: 500) {{ nodes {{ id name }} }}"))
            .collect::<Vec<_>>()
            .join(" ")
    );
    let nested = format!(
        "{{\"query\": \"{{ viewer {{ kind }} }}\", \"variables\": {}{}}}",
        "{\"a\":".repeat(5000),
        "1}".repeat(5000)
    );
    for (body, expected) in [
        (json!({ "query": deep }).to_string(), "nested too deeply"),
        (json!({ "query": wide }).to_string(), "too complex; ask for fewer"),
        (json!({ "query": format!("{{ {} }}", "a { ".repeat(20_000)) }).to_string(), "\"errors\""),
        (nested, "recursion limit"),
        ("{".to_owned(), "not a GraphQL request"),
        (json!({ "query": "{ clusters(first: 100000) { nodes { id } } }" }).to_string(), "\"errors\""),
        (json!({ "query": "{ clusters(after: \"%%\") { nodes { id } } }" }).to_string(), "is not a cursor"),
    ] {
        let answer = post(body.into_bytes()).await.unwrap().text().await.unwrap();
        assert!(answer.contains(expected), "{expected:?} is missing in {answer}");
    }
    // The server is as well as before.
    scene.client.ok("{ viewer { kind } }", json!({})).await;
    scene.nothing_happened().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_or_changed_driver_folder_is_told_and_the_good_ones_stay() {
    let scene = Scene::start().await;
    let drivers = scene.server.folder.path().join("drivers");
    let problems = async |expected: &str| {
        let query = "{ drivers { name versions { version } } driverProblems { folder messages } }";
        eventually(expected, Duration::from_secs(15), async || {
            let data = scene.client.ok(query, json!({})).await;
            if data["driverProblems"].to_string().contains(expected) { Ok(data) } else { Err(data) }
        })
        .await
    };
    std::fs::create_dir(drivers.join("broken")).unwrap();
    std::fs::write(
        drivers.join("broken/driver.styrmin.yml"),
        "apiVersion: styrmin.io/v1\nkind: ApplicationDriver\nmetadata: {name: broken}\nspec:\n  version: one\n",
    )
    .unwrap();
    let data = problems("driver.styrmin.yml:").await;
    assert_eq!(data["driverProblems"][0]["folder"], "broken");
    assert_eq!(data["drivers"].as_array().unwrap().len(), 2, "{data}");
    scene.client.web(&scene.environment, "works").await;

    // Other content under the same version: refused, the known one stays in use.
    let values = drivers.join("web-application/values.styrmin.yml");
    let text = std::fs::read_to_string(&values).unwrap();
    std::fs::write(&values, format!("{text}\nmore: 1\n")).unwrap();
    problems("a version never changes; raise spec.version").await;
    scene.client.web(&scene.environment, "still-works").await;

    // Under a new version it is loaded, and an upgrade to the same application version takes it.
    let file = drivers.join("web-application/driver.styrmin.yml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen("version: 1.0.0", "version: 1.1.0", 1)).unwrap();
    std::fs::remove_dir_all(drivers.join("broken")).unwrap();
    eventually("version 1.1.0 is loaded", Duration::from_secs(15), async || {
        let data =
            scene.client.ok("{ drivers { name versions { version } } driverProblems { messages } }", json!({})).await;
        let loaded = data["drivers"].to_string().contains("1.1.0") && data["driverProblems"] == json!([]);
        if loaded { Ok(()) } else { Err(data) }
    })
    .await;
    let (deployment, _) = scene.client.web(&scene.environment, "new").await;
    let query = "query($id: ID!) { deployment(id: $id) { driverVersion { version } } }";
    let version = async |id: &str| {
        scene.client.ok(query, json!({ "id": id })).await["deployment"]["driverVersion"]["version"].clone()
    };
    assert_eq!(version(&deployment).await, "1.1.0");
    let list = scene.client.ok("{ deployments { nodes { id name } } }", json!({})).await;
    let old = list["deployments"]["nodes"].as_array().unwrap().iter().find(|row| row["name"] == "works").unwrap()["id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(version(&old).await, "1.0.0");
    // The folder is gone for ever; what was loaded stays.
    std::fs::remove_dir_all(drivers.join("postgresql")).unwrap();
    let upgrade = "mutation($id: ID!) { upgradeDeployment(id: $id) { deployment { driverVersion { version } } task { workflow } } }";
    let data = scene.client.ok(upgrade, json!({ "id": old })).await;
    assert_eq!(
        data["upgradeDeployment"],
        json!({ "deployment": { "driverVersion": { "version": "1.1.0" } }, "task": { "workflow": "upgrade" } })
    );
    let drivers = scene.client.ok("{ drivers { name } }", json!({})).await;
    assert_eq!(drivers["drivers"], json!([{ "name": "postgresql" }, { "name": "web-application" }]));
}
