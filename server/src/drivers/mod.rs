//! Loads drivers from a folder, again whenever it changes, and keeps every version by its digest.
//!
//! The database is what counts: a version that was loaded once stays, whatever happens to its
//! folder. A folder that is broken, or that changes a version that is known, is a problem that
//! people can read; the good ones stay loaded.

use crate::clock::Clock;
use crate::store::{DriverVersion, Store, StoreError};
use notify_debouncer_full::{DebounceEventResult, new_debouncer, notify::RecursiveMode};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use styrmin_renderer::driver::check::{FILES_MAX, FOLDER_MAX};
use styrmin_renderer::driver::{self, DRIVER_FILE, Driver};
use styrmin_renderer::layout;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

/// How long the folder must be quiet before it is read.
const QUIET: Duration = Duration::from_millis(300);
/// How often it is read although nothing was noticed: a mounted ConfigMap swaps a symlink.
const RESCAN: Duration = Duration::from_secs(60);
/// How deep drivers may lie below the folder.
const DEPTH: usize = 4;

/// Every known driver version, and what is wrong with the folder.
#[derive(Debug, Default)]
pub struct Catalog {
    /// By name, oldest loaded first.
    pub versions: BTreeMap<String, Vec<Arc<Driver>>>,
    /// By digest.
    pub by_digest: HashMap<String, Arc<Driver>>,
    /// Folder below the drivers folder → what is wrong.
    pub problems: BTreeMap<String, Vec<String>>,
}

impl Catalog {
    fn add(&mut self, driver: Driver) {
        let driver = Arc::new(driver);
        if self.by_digest.insert(driver.digest.clone(), Arc::clone(&driver)).is_none() {
            self.versions.entry(driver.name().to_owned()).or_default().push(driver);
        }
    }

    /// The driver version that a file of a cluster's repository belongs to; `path` is below the cluster's folder.
    #[must_use]
    pub fn of_file(&self, path: &str) -> Option<&Arc<Driver>> {
        self.by_digest.values().find(|driver| {
            let folder = layout::chart_folder(driver.name(), &driver.digest);
            path == layout::driver_file(driver.name(), &driver.digest)
                || path.strip_prefix(&folder).is_some_and(|rest| rest.starts_with('/'))
        })
    }

    /// The driver version that a deployment gets.
    ///
    /// # Errors
    /// What is not there, with what is.
    pub fn select(
        &self,
        name: &str,
        application_version: Option<&str>,
        pinned: Option<&str>,
    ) -> Result<(Arc<Driver>, String), SelectError> {
        let Some(versions) = self.versions.get(name) else {
            let known: Vec<&str> = self.versions.keys().map(String::as_str).collect();
            return Err(SelectError {
                field: "driver",
                message: format!("there is no driver \"{name}\"; loaded are: {}", list(&known)),
            });
        };
        let known: Vec<String> = versions.iter().map(|driver| driver.version.to_string()).collect();
        let candidates: Vec<&Arc<Driver>> =
            versions.iter().filter(|driver| pinned.is_none_or(|pin| driver.version.to_string() == pin)).collect();
        if candidates.is_empty() {
            return Err(SelectError {
                field: "driver_version",
                message: format!(
                    "driver \"{name}\" has no version {}; loaded are: {}",
                    pinned.unwrap_or_default(),
                    list(&known)
                ),
            });
        }
        let wanted = match application_version {
            Some(version) => version.to_owned(),
            None => {
                let newest = candidates.iter().max_by(|a, b| a.version.cmp_precedence(&b.version));
                newest.and_then(|driver| driver.file.spec.default_version.clone()).ok_or_else(|| SelectError {
                    field: "application_version",
                    message: format!("driver \"{name}\" has no default; name a version of the application"),
                })?
            }
        };
        let chosen = driver::select(candidates.iter().map(|driver| driver.as_ref()), &wanted);
        match chosen.and_then(|driver| self.by_digest.get(&driver.digest)) {
            Some(driver) => Ok((Arc::clone(driver), wanted)),
            None => {
                let ranges: Vec<String> = candidates
                    .iter()
                    .map(|driver| format!("{} supports {}", driver.version, driver.file.spec.supported_versions))
                    .collect();
                Err(SelectError {
                    field: "application_version",
                    message: format!("no version of driver \"{name}\" supports \"{wanted}\": {}", list(&ranges)),
                })
            }
        }
    }
}

fn list<T: AsRef<str>>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")
}

/// Why no driver version could be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SelectError {
    /// Field of the deployment.
    pub field: &'static str,
    /// What is wrong and what there is.
    pub message: String,
}

/// The drivers that this server knows.
pub struct Drivers {
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    folder: PathBuf,
    catalog: RwLock<Arc<Catalog>>,
}

impl Drivers {
    /// Reads what was loaded before, and the folder.
    ///
    /// # Errors
    /// When the database fails. A folder that cannot be read is a problem in the catalog.
    pub async fn load(store: Arc<dyn Store>, clock: Arc<dyn Clock>, folder: PathBuf) -> anyhow::Result<Arc<Self>> {
        let drivers = Arc::new(Self { store, clock, folder, catalog: RwLock::default() });
        drivers.reload().await?;
        Ok(drivers)
    }

    /// The catalog as it is now.
    #[must_use]
    pub fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.catalog.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the folder again.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn reload(&self) -> anyhow::Result<()> {
        let folder = self.folder.clone();
        let found = tokio::task::spawn_blocking(move || scan(&folder)).await?;
        let mut problems = BTreeMap::new();
        for (path, result) in found {
            match result {
                Ok(driver) => {
                    let version = driver.version.to_string();
                    let row = DriverVersion {
                        digest: driver.digest.clone(),
                        name: driver.name().to_owned(),
                        version: version.clone(),
                        files: driver.files.clone(),
                        loaded_at: self.clock.now(),
                    };
                    match self.store.insert_driver(&row).await {
                        Ok(()) => {}
                        Err(StoreError::Exists) => {
                            let message = format!(
                                "{DRIVER_FILE}: spec.version: {} {version} is known with other content, and a version never changes; raise spec.version",
                                driver.name()
                            );
                            problems.insert(path, vec![message]);
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(messages) => {
                    problems.insert(path, messages);
                }
            }
        }
        let mut catalog = Catalog { problems, ..Catalog::default() };
        for row in self.store.drivers().await? {
            match Driver::from_files(row.files) {
                Ok(driver) => catalog.add(driver),
                // Loaded by another release with other rules: deployments that use it say so.
                Err(found) => {
                    warn!(driver = row.name, version = row.version, problem = %found[0], "stored driver is not usable");
                }
            }
        }
        let before = self.catalog();
        for (path, messages) in &catalog.problems {
            if before.problems.get(path) != Some(messages) {
                warn!(folder = path, problems = messages.join("; "), "driver not loaded");
            }
        }
        let count: usize = catalog.versions.values().map(Vec::len).sum();
        if before.by_digest.len() != count {
            info!(versions = count, "drivers loaded");
        }
        *self.catalog.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(catalog);
        Ok(())
    }

    /// Watches the folder until `stop`.
    pub async fn watch(self: Arc<Self>, stop: CancellationToken) {
        // One waiting notice is enough: a reload reads everything.
        let (sender, mut changed) = mpsc::channel::<()>(1);
        let notice = move |_: DebounceEventResult| {
            let _ = sender.try_send(());
        };
        let mut debouncer = new_debouncer(QUIET, None, notice)
            .inspect_err(|error| warn!(%error, "the drivers folder is only read on a timer"))
            .ok();
        if let Some(debouncer) = &mut debouncer
            && let Err(error) = debouncer.watch(&self.folder, RecursiveMode::Recursive)
        {
            warn!(%error, folder = %self.folder.display(), "the drivers folder is only read on a timer");
        }
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(()) = changed.recv() => {}
                () = tokio::time::sleep(RESCAN) => {}
            }
            if let Err(error) = self.reload().await {
                error!(error = format!("{error:#}"), "drivers could not be reloaded");
            }
        }
    }
}

type Scanned = Vec<(String, Result<Driver, Vec<String>>)>;

/// Every driver folder below `root`, each with its driver or its problems.
fn scan(root: &Path) -> Scanned {
    let mut found = Vec::new();
    let entries = match folders(root) {
        Ok(entries) => entries,
        Err(error) => return vec![(String::new(), Err(vec![format!("{}: {error}", root.display())]))],
    };
    for entry in entries {
        let before = found.len();
        scan_folder(root, &entry, DEPTH, &mut found);
        if found.len() == before {
            found.push((relative(root, &entry), Err(vec![format!("{DRIVER_FILE}: is missing; a driver needs it")])));
        }
    }
    found
}

fn scan_folder(root: &Path, folder: &Path, depth: usize, found: &mut Scanned) {
    let name = relative(root, folder);
    if folder.join(DRIVER_FILE).is_file() {
        let driver = read_files(folder).map_err(|message| vec![message]).and_then(|files| {
            Driver::from_files(files).map_err(|problems| problems.iter().map(ToString::to_string).collect())
        });
        found.push((name, driver));
        return;
    }
    if depth == 0 {
        return;
    }
    match folders(folder) {
        Ok(entries) => entries.iter().for_each(|entry| scan_folder(root, entry, depth - 1, found)),
        Err(error) => found.push((name, Err(vec![error.to_string()]))),
    }
}

/// Folders in `folder`, sorted; hidden ones and the `..data` of a mounted ConfigMap left out.
fn folders(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)?
        .filter_map(Result::ok)
        .filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    entries.sort();
    Ok(entries)
}

fn relative(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).to_string_lossy().into_owned()
}

/// All files of a driver's folder, by path; stops at the limits of a driver.
fn read_files(folder: &Path) -> Result<BTreeMap<String, String>, String> {
    let mut files = BTreeMap::new();
    let mut waiting = vec![(folder.to_path_buf(), DEPTH * 2)];
    let mut total = 0;
    while let Some((current, depth)) = waiting.pop() {
        let entries =
            std::fs::read_dir(&current).map_err(|error| format!("{}: {error}", relative(folder, &current)))?;
        for entry in entries.filter_map(Result::ok) {
            let path = entry.path();
            let name = relative(folder, &path);
            if entry.file_name().to_string_lossy().starts_with('.') && entry.file_name() != ".helmignore" {
                continue;
            }
            let about = std::fs::metadata(&path).map_err(|error| format!("{name}: {error}"))?;
            if about.is_dir() {
                if depth == 0 {
                    return Err(format!("{name}: lies too deep"));
                }
                waiting.push((path, depth - 1));
                continue;
            }
            total += usize::try_from(about.len()).unwrap_or(usize::MAX);
            if total > FOLDER_MAX || files.len() >= FILES_MAX {
                return Err(format!(
                    "{name}: the driver is larger than {FOLDER_MAX} bytes or {FILES_MAX} files; leave out what it does not need"
                ));
            }
            let bytes = std::fs::read(&path).map_err(|error| format!("{name}: {error}"))?;
            let text = String::from_utf8(bytes).map_err(|_| format!("{name}: is not UTF-8 text"))?;
            files.insert(name, text);
        }
    }
    Ok(files)
}
