//! `styrminctl validate`: what is wrong with a checkout, and what it would change, without a server.

use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;
use std::time::Duration;
use styrmin_renderer::yaml;
use styrmin_tests::child;
use styrmin_tests::people::Person;
use styrmin_tests::server::{Api as _, Server, program};

const LIMIT: Duration = Duration::from_secs(30);

async fn validate(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = child(program("styrminctl").to_str().unwrap());
    command.arg("validate").arg(folder).args(arguments).env_remove("STYRMIN_TOKEN");
    command.output().await.unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A checkout of what a server wrote: a deployment, and one with a secret.
struct Scene {
    server: Server,
    pat: Person,
    front: String,
    db: String,
}

impl Scene {
    async fn start(path: &str) -> Self {
        let server = Server::start().await;
        let client = server.client();
        let recipient = age::x25519::Identity::generate().to_public().to_string();
        let repository = styrmin_tests::git::bare(server.folder.path()).await;
        let git = json!({ "url": repository, "path": path });
        let (cluster, _) = client.cluster(json!({ "name": "c", "ageRecipient": recipient, "git": git })).await;
        let environment = client.environment(&cluster, "e").await;
        let (front, _) = client.web(&environment, "front").await;
        let input = json!({ "environment": environment, "name": "db", "driver": "postgresql", "applicationVersion": "17",
            "parameters": { "password": "hunter-2" } });
        let (db, _) = client.create(input).await.unwrap();
        server.drained(LIMIT).await;
        client.set_variable(&front, "COLOR", "blue").await.unwrap();
        server.drained(LIMIT).await;
        let pat = Person::of(repository.to_str().unwrap()).await;
        Self { server, pat, front, db }
    }

    /// What is said of the checkout with one thing broken; puts it back.
    async fn broken(&self, expected: &str, breaks: impl FnOnce(&Person)) -> Vec<String> {
        breaks(&self.pat);
        let output = validate(self.pat.work(), &["-o", "json"]).await;
        assert_eq!(output.status.code(), Some(1), "{expected}: {}", text(&output));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        self.pat.git(&["add", "-A"]).await;
        self.pat.git(&["reset", "--quiet", "--hard", "HEAD"]).await;
        let problems = found["problems"].as_array().unwrap();
        problems
            .iter()
            .map(|one| {
                let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
                let text = |key: &str| one[key].as_str().unwrap().to_owned();
                format!("{}:{} {}: {}", name(&text("path")), one["line"], text("field"), text("message"))
            })
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_server_writes_is_good_and_what_differs_is_said_in_words() {
    let scene = Scene::start("").await;
    let good = validate(scene.pat.work(), &[]).await;
    assert_eq!((good.status.code(), text(&good).as_str()), (Some(0), "2 deployments, 0 problems\n"));
    let compared = validate(scene.pat.work(), &["--base", "HEAD~1"]).await;
    assert_eq!(
        text(&compared),
        "changes deployment front\n  config.env_vars.COLOR: \"blue\", was not set\n2 deployments, 0 problems\n"
    );
    scene.pat.git(&["revert", "--no-edit", "HEAD"]).await;
    let back = validate(scene.pat.work(), &["--base", "HEAD~1"]).await;
    assert_eq!(
        text(&back),
        "takes deployment front back from change 2 to change 1\n  config.env_vars.COLOR: not set any more, was \"blue\"\n2 deployments, 0 problems\n"
    );
    scene.pat.git(&["rm", "-r", "--quiet", &scene.pat.path(&scene.db).replace("/styrmindeployment.yaml", "")]).await;
    let removed = text(&validate(scene.pat.work(), &["--base", "HEAD"]).await);
    assert!(removed.contains("removes deployment db; the application runs on until somebody confirms it"), "{removed}");
    for (arguments, said) in
        [(&["--base", "nowhere"][..], "nowhere"), (&["--path", "else"][..], "is this a cluster's repository?")]
    {
        let output = validate(scene.pat.work(), arguments).await;
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains(said), "{output:?}");
    }
    assert!(!scene.server.log().contains("validate"), "no server is asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_slip_is_named_with_file_line_and_field() {
    let scene = Scene::start("").await;
    let front = scene.pat.path(&scene.front);
    let replace = |path: &str, from: &str, to: &str| {
        let text = scene.pat.read(path);
        assert!(text.contains(from), "{from}: {text}");
        scene.pat.write(path, &text.replacen(from, to, 1));
    };
    let find = |start: &str| scene.pat.listed().into_iter().find(|path| path.starts_with(start)).unwrap();
    let driver = find("cluster/drivers/");
    let chart = find("charts/");
    let edit = |change: &dyn Fn(&mut Value)| {
        let mut value: Value = yaml::from_str(&scene.pat.read(&front)).unwrap();
        change(&mut value);
        scene.pat.write(&front, &yaml::to_string(&value).unwrap());
    };
    let secrets = front.replace(&scene.front, &scene.db).replace("styrmindeployment", "secrets.sops");
    let keep = front.replace(&format!("{}/styrmindeployment.yaml", scene.front), "keep.yaml");
    type Break<'a> = Box<dyn FnOnce(&Person) + 'a>;
    let table: Vec<(Break<'_>, &str)> = vec![
        (
            Box::new(|_| replace(&front, "apiVersion:", "piVersion:")),
            "styrmindeployment.yaml:1 apiVersion: is missing, not \"styrmin.io/v1alpha1\"",
        ),
        (Box::new(|_| replace(&front, "kind: ", "kind: [")), "styrmindeployment.yaml:"),
        (Box::new(|_| scene.pat.write(&front, "")), "styrmindeployment.yaml:0 : is empty: Flux removes the deployment"),
        (
            Box::new(|_| edit(&|value| value["spec"]["lifecycle"] = json!("asleep"))),
            " spec.lifecycle: \"asleep\" is not one of",
        ),
        (
            Box::new(|_| edit(&|value| value["spec"]["deploymentId"] = json!("a23456789012"))),
            " spec.deploymentId: is a23456789012, but the folder is",
        ),
        (
            Box::new(|_| edit(&|value| value["metadata"]["name"] = json!("shop"))),
            " metadata.name: is \"shop\", not \"styrmin-",
        ),
        (
            Box::new(|_| edit(&|value| value["metadata"]["namespace"] = json!("default"))),
            " metadata.namespace: is \"default\", not \"styrmin-env-",
        ),
        (
            Box::new(|_| {
                edit(&|value| value["metadata"]["annotations"]["styrmin.io/instance-sequence"] = json!("first"));
            }),
            "is no sequence: 1 or more, in quotes",
        ),
        (
            Box::new(|_| edit(&|value| value["spec"]["driver"]["digest"] = json!("sha256:0123456789abcdef"))),
            " spec.driver.digest: there is no cluster/drivers/web-application-0123456789ab.yaml: the deployment would wait for it",
        ),
        (
            Box::new(|_| {
                edit(&|value| drop(value["spec"]["context"]["parameters"].as_object_mut().unwrap().remove("image")));
            }),
            " spec.context: the driver cannot render its values with this: ",
        ),
        (
            Box::new(|_| replace(&driver, "supported_versions", "unsupported_versions")),
            ".yaml:0 data.driver.styrmin.yml: ",
        ),
        (Box::new(|_| replace(&chart, "name:", "nam:")), ".yaml:0 data: this or the chart is not what the digest says"),
        (
            Box::new(|_| replace(&secrets, "password: ENC[", "password: hunter-3[")),
            "secrets.sops.yaml:0 stringData.password: is not encrypted",
        ),
        (
            Box::new(|pat| std::fs::remove_file(pat.work().join(&secrets)).unwrap()),
            "secrets.sops.yaml:0 stringData.password: is missing: the deployment would wait",
        ),
        (Box::new(|pat| std::fs::remove_file(pat.work().join(&keep)).unwrap()), "keep.yaml:0 : is missing"),
        (
            Box::new(|pat| std::fs::remove_dir_all(pat.work().join("cluster/environments")).unwrap()),
            ".yaml:0 : is missing: nothing applies the deployments",
        ),
        (Box::new(|pat| pat.write(&front.replace("styrmindeployment", "app"), &pat.read(&front))), "app.yaml:"),
    ];
    for (breaks, expected) in table {
        let found = scene.broken(expected, breaks).await;
        assert!(found.iter().any(|said| said.contains(expected)), "{expected}: {found:#?}");
        assert!(!found.iter().any(|said| said.contains("hunter")), "{found:#?}");
    }
}

/// The jobs that the repository brings for its forge run as they stand there.
#[tokio::test(flavor = "multi_thread")]
async fn the_jobs_of_the_template_work() {
    for path in ["", "clusters/one"] {
        let scene = Scene::start(path).await;
        let read = |name: &str| -> Value {
            let name = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
            yaml::from_str(&scene.pat.read(&name)).unwrap()
        };
        let github = read("ci/github.yaml")["jobs"]["validate"]["steps"][1]["run"].as_str().unwrap().to_owned();
        let gitlab: Vec<String> =
            serde_json::from_value(read("ci/gitlab.yaml")["styrmin-validate"]["script"].clone()).unwrap();
        let programs = program("styrminctl").parent().unwrap().display().to_string();
        for (script, variable) in [(github, "BASE"), (gitlab.join("\n"), "CI_COMMIT_BEFORE_SHA")] {
            for (broken, code) in [(false, 0), (true, 1)] {
                if broken {
                    scene.pat.write(&scene.pat.path(&scene.front), "");
                }
                let mut command = child("sh");
                command.args(["-e", "-c", &script]).current_dir(scene.pat.work()).env(variable, "HEAD~1");
                command.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap()));
                let output = command.output().await.unwrap();
                assert_eq!(output.status.code(), Some(code), "{script}: {output:?}");
                assert!(text(&output).contains("deployment front"), "{output:?}");
                scene.pat.git(&["reset", "--quiet", "--hard", "HEAD"]).await;
            }
        }
    }
}
