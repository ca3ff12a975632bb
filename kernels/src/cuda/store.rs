//! The artifact store: compiled kernels on disk, so that a restart and an image with a filled store compile nothing.
//!
//! A store is a directory: `<store>/<arch>/<class>/<first 16 digits of the source hash>-<compiler>.cubin`. A file is written
//! beside its place and renamed into it, so that readers and concurrent writers see whole files only; it is checked each time
//! it is loaded ([`Broken`]), and a broken one is compiled anew. Machine code is trusted as far as its place is: a store that
//! others than its owner may write, or whose owner is neither this user nor root, is refused.
//!
//! [`Artifacts`] is a list of stores and perhaps a compiler. Stores are read in order, a baked one first; what is compiled is
//! written to the first one that may be written.

mod artifact;

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use statecopy_proto::{Refusal, RefusalCode};

pub use self::artifact::{ArtifactKey, Broken};
use super::class::CudaClass;
use super::compile::{Arch, CompileError, Compiler, source_hash};

/// Digits of the source hash in a file's name.
const SOURCE_DIGITS: usize = 16;
const SUFFIX: &str = ".cubin";
/// Entries of one directory that are looked at.
const FILES_MAX: usize = 1_024;

/// The store of a user, from the values of `XDG_CACHE_HOME` and `HOME`; without either, that of the system.
#[must_use]
pub fn default_directory(cache_home: Option<&OsStr>, home: Option<&OsStr>) -> PathBuf {
    let absolute = |value: Option<&OsStr>| value.map(PathBuf::from).filter(|it| it.is_absolute());
    absolute(cache_home)
        .or_else(|| absolute(home).map(|home| home.join(".cache")))
        .unwrap_or_else(|| PathBuf::from("/var/cache"))
        .join("statecopy/kernels")
}

/// Why a store, or one file of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refuses.
    #[error("{} cannot be {what}: {reason}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// `read`, `written` or `created`.
        what: &'static str,
        /// Why.
        reason: io::Error,
    },
    /// Somebody else could put code there.
    #[error("{} is not trusted as a place of machine code: {why}", path.display())]
    Untrusted {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file is damaged, or another artifact.
    #[error("The artifact {} is broken: {broken}", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// How.
        broken: Broken,
    },
    /// A directory that no build fills, of which nothing is used.
    #[error("{} has more than {FILES_MAX} entries, and what it holds is not looked at", path.display())]
    Crowded {
        /// The directory.
        path: PathBuf,
    },
}

impl StoreError {
    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Io { what: "read", reason, .. } if reason.kind() == io::ErrorKind::NotFound => {
                "Name a store that is there, or fill one with `statecopy kernels build`."
            }
            Self::Io { .. } => "Name a store that this user may use, or make this one so.",
            Self::Untrusted { .. } => {
                "Let the store and what is in it belong to this user or to root, writable by its owner only (chmod go-w)."
            }
            Self::Broken { .. } => {
                "Remove the file, and fill the store again with `statecopy kernels build`."
            }
            Self::Crowded { .. } => "Remove what is no artifact, and those of older versions.",
        }
    }

    fn io(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |reason| Self::Io { path, what, reason }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Self::new(RefusalCode::PrepareFailed, error.to_string()).remedied_by(error.remedy())
    }
}

/// One file of a store.
#[derive(Debug)]
pub struct Entry {
    /// The file.
    pub path: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// What it holds, or why it cannot be used.
    pub found: Result<ArtifactKey, StoreError>,
}

/// One directory of artifacts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    directory: PathBuf,
}

impl Store {
    /// Opens a store to read.
    ///
    /// # Errors
    /// When it is no directory, or one that others may write.
    pub fn open(directory: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let directory = directory.into();
        let metadata = fs::metadata(&directory).map_err(StoreError::io(&directory, "read"))?;
        if !metadata.is_dir() {
            let reason = io::Error::from(io::ErrorKind::NotADirectory);
            return Err(StoreError::Io { path: directory, what: "read", reason });
        }
        trust(&directory, &metadata)?;
        Ok(Self { directory })
    }

    /// Opens a store, and makes it (for this user alone) where it is not there.
    ///
    /// # Errors
    /// When it cannot be made, or is one that others may write.
    pub fn create(directory: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let directory = directory.into();
        create_directory(&directory)?;
        Self::open(directory)
    }

    /// Where it is.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where an artifact lies.
    #[must_use]
    pub fn path_of(&self, key: &ArtifactKey) -> PathBuf {
        let digits = key.source.get(..SOURCE_DIGITS).unwrap_or(&key.source);
        let name = format!("{digits}-{}{SUFFIX}", key.compiler);
        self.directory_of(key.arch, key.class).join(name)
    }

    /// The code of an artifact; `None` when it is not there.
    ///
    /// # Errors
    /// When the file is there and cannot be used.
    pub fn load(&self, key: &ArtifactKey) -> Result<Option<Vec<u8>>, StoreError> {
        let path = self.path_of(key);
        let Some(file) = read(&path)? else { return Ok(None) };
        let broken = |broken| StoreError::Broken { path: path.clone(), broken };
        let (found, code) = artifact::decode(&file).map_err(broken)?;
        artifact::compare(&found, key).map_err(broken)?;
        Ok(Some(code.to_vec()))
    }

    /// Keeps the code of an artifact, and says where.
    ///
    /// # Errors
    /// When it cannot be written. What was there before is then still there.
    pub fn save(&self, key: &ArtifactKey, code: &[u8]) -> Result<PathBuf, StoreError> {
        let path = self.path_of(key);
        let directory = self.directory_of(key.arch, key.class);
        create_directory(&directory)?;
        let written = StoreError::io(&path, "written");
        // Not synchronised to the disk: what a crash leaves is checked when it is loaded.
        let write = || -> io::Result<()> {
            let mut file = tempfile::Builder::new().prefix(".").tempfile_in(&directory)?;
            file.write_all(&artifact::encode(key, code))?;
            file.persist(&path)?;
            Ok(())
        };
        write().map_err(written)?;
        Ok(path)
    }

    /// What is there of a source for a class and a chip, whichever the compiler, newest compiler first.
    fn of_any_compiler(
        &self,
        arch: Arch,
        class: CudaClass,
        source: &str,
    ) -> Result<Vec<ArtifactKey>, StoreError> {
        let prefix = format!("{}-", source.get(..SOURCE_DIGITS).unwrap_or(source));
        let mut compilers: Vec<String> = names(&self.directory_of(arch, class))?
            .into_iter()
            .filter_map(|name| Some(name.strip_prefix(&prefix)?.strip_suffix(SUFFIX)?.to_owned()))
            .collect();
        compilers.reverse();
        let key = |compiler| ArtifactKey { arch, class, source: source.to_owned(), compiler };
        Ok(compilers.into_iter().map(key).collect())
    }

    fn chips(&self) -> Result<Vec<Arch>, StoreError> {
        Ok(names(&self.directory)?.into_iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// Every file of the store, each checked as a load would.
    ///
    /// # Errors
    /// When a directory of the store cannot be read: what it holds is then unknown.
    pub fn entries(&self) -> Result<Vec<Entry>, StoreError> {
        let mut entries = Vec::new();
        for arch in self.chips()? {
            let classes = names(&self.directory.join(arch.to_string()))?;
            for class in classes.iter().filter_map(|name| CudaClass::named(name)) {
                let directory = self.directory_of(arch, class);
                for name in names(&directory)?.iter().filter(|name| name.ends_with(SUFFIX)) {
                    entries.push(self.entry(directory.join(name), arch, class));
                }
            }
        }
        Ok(entries)
    }

    /// For which chips it holds kernels, in a sentence.
    fn holds(&self) -> String {
        let chips = match self.chips() {
            Ok(chips) => chips,
            Err(error) => return error.to_string(),
        };
        let chips: Vec<String> = chips.iter().map(Arch::to_string).collect();
        let chips = if chips.is_empty() { "nothing".to_owned() } else { chips.join(", ") };
        format!("{} holds kernels for {chips}", self.directory.display())
    }

    fn entry(&self, path: PathBuf, arch: Arch, class: CudaClass) -> Entry {
        let mut bytes = 0;
        let mut check = || {
            let file = read(&path)?.unwrap_or_default();
            bytes = file.len() as u64;
            let broken = |broken| StoreError::Broken { path: path.clone(), broken };
            let (found, _) = artifact::decode(&file).map_err(broken)?;
            let placed = ArtifactKey { arch, class, ..found.clone() };
            artifact::compare(&found, &placed).map_err(broken)?;
            if self.path_of(&found) != path {
                let found = format!("{} by {}", found.source, found.compiler);
                return Err(broken(Broken::Other { what: "source or compiler", found }));
            }
            Ok(found)
        };
        let found = check();
        Entry { path, bytes, found }
    }

    fn directory_of(&self, arch: Arch, class: CudaClass) -> PathBuf {
        self.directory.join(arch.to_string()).join(class.name())
    }
}

/// Where the code of a class came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// This file of a store.
    Stored(PathBuf),
    /// The compiler; it is kept in this file, if a store could be written.
    Compiled(Option<PathBuf>),
}

/// The code of a class for a chip.
#[derive(Debug)]
pub struct Artifact {
    /// The machine code: a cubin with a kernel for each variant.
    pub code: Vec<u8>,
    /// Where it came from.
    pub origin: Origin,
    /// What went wrong on the way and did not matter: broken files, a store that could not be written.
    pub problems: Vec<StoreError>,
}

/// Stores in the order in which they are read, and the compiler if there is one.
#[derive(Debug)]
pub struct Artifacts {
    stores: Vec<Store>,
    writable: Option<Store>,
    compiler: Result<Compiler, CompileError>,
    source: String,
}

impl Artifacts {
    /// `stores` are read in order; `writable` is read after them, and is where new artifacts go.
    #[must_use]
    pub fn new(
        mut stores: Vec<Store>,
        writable: Option<Store>,
        compiler: Result<Compiler, CompileError>,
    ) -> Self {
        stores.extend(writable.clone());
        Self { stores, writable, compiler, source: source_hash() }
    }

    /// The chips for which the stores have something; those of a directory that cannot be read are left out.
    #[must_use]
    pub fn architectures(&self) -> Vec<Arch> {
        self.stores.iter().flat_map(|store| store.chips().unwrap_or_default()).collect()
    }

    /// The compiler, or why there is none.
    ///
    /// # Errors
    /// When none could be opened.
    pub fn compiler(&self) -> Result<&Compiler, &CompileError> {
        self.compiler.as_ref()
    }

    /// The code of a class for a chip: from a store, else compiled. Without a compiler an artifact of the same source by any
    /// compiler will do; with one, only its own.
    ///
    /// # Errors
    /// PREPARE_FAILED naming the chip, what is missing and what is broken.
    pub fn obtain(&self, arch: Arch, class: CudaClass) -> Result<Artifact, Refusal> {
        let mut problems = Vec::new();
        for store in &self.stores {
            let candidates = self.candidates(store, arch, class).unwrap_or_else(|error| {
                problems.push(error);
                Vec::new()
            });
            for key in candidates {
                match store.load(&key) {
                    Ok(Some(code)) => {
                        let origin = Origin::Stored(store.path_of(&key));
                        return Ok(Artifact { code, origin, problems });
                    }
                    Ok(None) => {}
                    Err(error) => problems.push(error),
                }
            }
        }
        match &self.compiler {
            Ok(compiler) => self.compile(compiler, arch, class, problems),
            Err(error) => Err(self.nothing(arch, class, error, problems)),
        }
    }

    /// Compiles a class for a chip, whatever the stores hold, and keeps it.
    ///
    /// # Errors
    /// PREPARE_FAILED with the compiler's message, or that there is no compiler.
    pub fn renew(&self, arch: Arch, class: CudaClass) -> Result<Artifact, Refusal> {
        let compiler = self.compiler.as_ref().map_err(|error| Refusal::from(error.clone()))?;
        self.compile(compiler, arch, class, Vec::new())
    }

    fn candidates(
        &self,
        store: &Store,
        arch: Arch,
        class: CudaClass,
    ) -> Result<Vec<ArtifactKey>, StoreError> {
        match &self.compiler {
            Ok(compiler) => Ok(vec![self.key(compiler, arch, class)]),
            Err(_) => store.of_any_compiler(arch, class, &self.source),
        }
    }

    fn key(&self, compiler: &Compiler, arch: Arch, class: CudaClass) -> ArtifactKey {
        let compiler = compiler.version().to_string();
        ArtifactKey { arch, class, source: self.source.clone(), compiler }
    }

    fn compile(
        &self,
        compiler: &Compiler,
        arch: Arch,
        class: CudaClass,
        mut problems: Vec<StoreError>,
    ) -> Result<Artifact, Refusal> {
        let code = compiler.compile(arch, class)?;
        let kept = match &self.writable {
            None => None,
            Some(store) => match store.save(&self.key(compiler, arch, class), &code) {
                Ok(path) => Some(path),
                Err(error) => {
                    problems.push(error);
                    None
                }
            },
        };
        Ok(Artifact { code, origin: Origin::Compiled(kept), problems })
    }

    fn nothing(
        &self,
        arch: Arch,
        class: CudaClass,
        error: &CompileError,
        problems: Vec<StoreError>,
    ) -> Refusal {
        let mut sentence = format!("There is no kernel {} for {arch}", class.name());
        if self.stores.is_empty() {
            sentence.push_str(": no store is named");
        }
        for store in &self.stores {
            sentence.push_str(&format!("; {}", store.holds()));
        }
        for problem in problems {
            sentence.push_str(&format!("; {problem}"));
        }
        sentence.push_str(&format!("; and there is no compiler: {error}"));
        Refusal::new(RefusalCode::PrepareFailed, sentence).about(arch.to_string()).remedied_by(
            format!(
                "Fill a store with `statecopy kernels build --arch {arch} --all --store DIR` and name it to the daemon, or \
                 install NVRTC (pip install nvidia-cuda-nvrtc) and name its directory as cuda.nvrtc_directory."
            ),
        )
    }
}

fn create_directory(directory: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(StoreError::io(directory, "created"))
}

/// The bytes of a file; `None` when it is not there.
fn read(path: &Path) -> Result<Option<Vec<u8>>, StoreError> {
    let failed = |error: io::Error| StoreError::io(path, "read")(error);
    // A fifo in its place would block the opening.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(descriptor) => File::from(descriptor),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(None),
        Err(error) => return Err(failed(error.into())),
    };
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        let why = "it is no regular file".to_owned();
        return Err(StoreError::Untrusted { path: path.to_owned(), why });
    }
    trust(path, &metadata)?;
    let mut bytes = Vec::new();
    let limit = artifact::FILE_BYTES_MAX + 1;
    let found = file.take(limit).read_to_end(&mut bytes).map_err(failed)? as u64;
    if found == limit {
        let broken = Broken::TooLarge { found: metadata.len() };
        return Err(StoreError::Broken { path: path.to_owned(), broken });
    }
    Ok(Some(bytes))
}

fn trust(path: &Path, metadata: &Metadata) -> Result<(), StoreError> {
    let why = untrusted(metadata.uid(), metadata.mode(), rustix::process::geteuid().as_raw());
    match why {
        Some(why) => Err(StoreError::Untrusted { path: path.to_owned(), why }),
        None => Ok(()),
    }
}

/// Why what has this owner and mode is no place for code that `user` runs.
fn untrusted(owner: u32, mode: u32, user: u32) -> Option<String> {
    if owner != user && owner != 0 {
        return Some(format!("it belongs to user {owner}, and this is user {user}"));
    }
    (mode & 0o022 != 0)
        .then(|| format!("others than its owner may write it (mode {:04o})", mode & 0o7777))
}

/// The names in a directory, sorted; none when it is not there.
fn names(directory: &Path) -> Result<Vec<String>, StoreError> {
    let failed = |error| StoreError::io(directory, "read")(error);
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(failed(error)),
    };
    let mut names = Vec::new();
    for (count, entry) in entries.enumerate() {
        if count >= FILES_MAX {
            return Err(StoreError::Crowded { path: directory.to_owned() });
        }
        // A name that is no UTF-8 is none of ours.
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests;
