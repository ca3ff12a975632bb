//! NVRTC: `state_copy.cu` to machine code, with or without a GPU in the machine.
//!
//! The library is opened at run time. An artifact depends on the source ([`source_hash`]), the architecture, the class and the
//! compiler's version, and on nothing else: no environment variable, no header of the machine.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;
use std::str::FromStr;

use libloading::os::unix::Library;
use statecopy_proto::{Refusal, RefusalCode};

use super::arguments::{CHUNK_BYTES, INLINE_BYTES_MAX, THREADS, layout_assertions};
use super::class::CudaClass;
use super::library;

/// The names that NVRTC has, newest first.
const LIBRARIES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"];
/// Options that every compilation gets.
const OPTIONS: [&str; 1] = ["--std=c++17"];
/// Bytes of a compiler's log that an error carries.
const LOG_BYTES_MAX: usize = 2_000;

/// A chip's architecture, as in `sm_90`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch(u32);

/// Text that names no architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no architecture: it is sm_ and the compute capability without its dot, as in sm_80, sm_90 or sm_100"
)]
pub struct NoArch(String);

impl Arch {
    /// The architecture of a device of that compute capability.
    #[must_use]
    pub const fn of_capability(major: u32, minor: u32) -> Self {
        Self(major * 10 + minor)
    }
}

impl FromStr for Arch {
    type Err = NoArch;

    fn from_str(text: &str) -> Result<Self, NoArch> {
        let digits = text.strip_prefix("sm_").filter(|digits| {
            (2..=3).contains(&digits.len())
                && digits.bytes().all(|digit| digit.is_ascii_digit())
                && !digits.starts_with('0')
        });
        digits
            .and_then(|digits| digits.parse().ok())
            .map(Self)
            .ok_or_else(|| NoArch(text.to_owned()))
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}", self.0)
    }
}

/// Which compiler, as in `nvrtc-13.0`: all that NVRTC says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CompilerVersion {
    major: u32,
    minor: u32,
}

impl fmt::Display for CompilerVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nvrtc-{}.{}", self.major, self.minor)
    }
}

/// What is compiled: `state_copy.cu` with its constants before it and the layout of its argument asserted behind it.
#[must_use]
pub fn source() -> String {
    format!(
        "#define THREADS {THREADS}\n#define CHUNK_BYTES {CHUNK_BYTES}\n#define INLINE_BYTES {INLINE_BYTES_MAX}\n\
         #line 1 \"state_copy.cu\"\n{}{}",
        include_str!("state_copy.cu"),
        layout_assertions()
    )
}

/// The hash of [`source`] and of the options that every compilation gets, in hexadecimal.
#[must_use]
pub fn source_hash() -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(OPTIONS.join(" ").as_bytes());
    hasher.update(source().as_bytes());
    hasher.finalize().to_hex().to_string()
}

/// Why there is no compiler, or no code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// NVRTC was found nowhere.
    #[error("NVRTC cannot be loaded: {reason}")]
    Missing {
        /// What the loader says of each name that was tried.
        reason: String,
    },
    /// The library is older than what is needed of it.
    #[error("NVRTC {} has no function {symbol}", library.display())]
    Symbol {
        /// The library.
        library: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The compiler does not know the chip.
    #[error("{compiler} does not compile for {arch}; it compiles for {known}")]
    Arch {
        /// The compiler.
        compiler: CompilerVersion,
        /// The chip.
        arch: Arch,
        /// The chips that it knows.
        known: String,
    },
    /// The compiler refused.
    #[error("{compiler} failed to compile {class} for {arch}: {status}: {log}")]
    Failed {
        /// The compiler.
        compiler: CompilerVersion,
        /// The class.
        class: String,
        /// The chip.
        arch: Arch,
        /// The compiler's status in words.
        status: String,
        /// What the compiler wrote, shortened.
        log: String,
    },
}

impl CompileError {
    /// What the operator of a daemon does about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Missing { .. } | Self::Symbol { .. } => {
                "Install NVRTC 11.7 or newer (pip install nvidia-cuda-nvrtc) and name its directory as cuda.nvrtc_directory, or \
                 use a store that `statecopy kernels build` has filled."
            }
            Self::Arch { .. } => "Install an NVRTC that knows the chip.",
            Self::Failed { .. } => {
                "Install NVRTC whole (libnvrtc and libnvrtc-builtins of one version side by side), or another version of it; where \
                 the log speaks of the source, please report it."
            }
        }
    }
}

impl From<CompileError> for Refusal {
    fn from(error: CompileError) -> Self {
        Self::new(RefusalCode::PrepareFailed, error.to_string()).remedied_by(error.remedy())
    }
}

/// `nvrtcResult`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Status(c_int);

const SUCCESS: Status = Status(0);

/// `nvrtcProgram`.
type Program = *mut std::ffi::c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal($($type:ty),*) -> $result:ty;)*) => {
        struct Functions {
            $($field: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Functions {
            fn resolve(library: &Library, path: &Path) -> Result<Self, CompileError> {
                $(
                    // SAFETY: `nvrtc.h` gives the symbol that type. The library is never unloaded.
                    let found = unsafe {
                        library.get::<unsafe extern "C" fn($($type),*) -> $result>($symbol.as_bytes())
                    };
                    let missing =
                        |_| CompileError::Symbol { library: path.to_owned(), symbol: $symbol };
                    let $field = *found.map_err(missing)?;
                )*
                Ok(Self { $($field,)* })
            }
        }
    };
}

functions! {
    version = "nvrtcVersion"(*mut c_int, *mut c_int) -> Status;
    get_error_string = "nvrtcGetErrorString"(Status) -> *const c_char;
    get_num_supported_archs = "nvrtcGetNumSupportedArchs"(*mut c_int) -> Status;
    get_supported_archs = "nvrtcGetSupportedArchs"(*mut c_int) -> Status;
    create_program = "nvrtcCreateProgram"(
        *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    compile_program = "nvrtcCompileProgram"(Program, c_int, *const *const c_char) -> Status;
    destroy_program = "nvrtcDestroyProgram"(*mut Program) -> Status;
    get_log_size = "nvrtcGetProgramLogSize"(Program, *mut usize) -> Status;
    get_log = "nvrtcGetProgramLog"(Program, *mut c_char) -> Status;
    get_cubin_size = "nvrtcGetCUBINSize"(Program, *mut usize) -> Status;
    get_cubin = "nvrtcGetCUBIN"(Program, *mut c_char) -> Status;
}

/// NVRTC, opened. May be used by several threads at once.
pub struct Compiler {
    functions: Functions,
    version: CompilerVersion,
    architectures: Vec<Arch>,
}

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Compiler {
    /// Opens NVRTC: of a directory, or where the system's loader looks (`LD_LIBRARY_PATH`, then the usual places).
    ///
    /// # Errors
    /// When it is not there, or too old.
    pub fn open(directory: Option<&Path>) -> Result<Self, CompileError> {
        let mut reasons = Vec::new();
        for name in LIBRARIES {
            let path = directory.map_or_else(|| PathBuf::from(name), |it| it.join(name));
            match open_library(&path) {
                Ok(library) => return Self::resolve(library, &path, directory),
                Err(reason) => reasons.push(reason),
            }
        }
        Err(CompileError::Missing { reason: reasons.join("; ") })
    }

    fn resolve(
        library: Library,
        path: &Path,
        directory: Option<&Path>,
    ) -> Result<Self, CompileError> {
        // Never unloaded: it keeps threads and exit handlers of its own.
        let library = ManuallyDrop::new(library);
        let functions = Functions::resolve(&library, path)?;
        let version = version(&functions);
        if let Some(directory) = directory {
            // NVRTC opens this one later, by its name alone, and then finds the one that is open already. Where it is not
            // there NVRTC looks elsewhere, and says in its log what it did not find.
            let name = format!("libnvrtc-builtins.so.{}.{}", version.major, version.minor);
            let _kept_open = open_library(&directory.join(name)).map(ManuallyDrop::new);
        }
        let architectures = architectures(&functions);
        Ok(Self { functions, version, architectures })
    }

    /// Which compiler it is.
    #[must_use]
    pub fn version(&self) -> CompilerVersion {
        self.version
    }

    /// Compiles the variants of a class to machine code of one architecture (a cubin).
    ///
    /// # Errors
    /// With the compiler's log.
    ///
    /// # Panics
    /// Never: the source has no NUL.
    pub fn compile(&self, arch: Arch, class: CudaClass) -> Result<Vec<u8>, CompileError> {
        if !self.architectures.is_empty() && !self.architectures.contains(&arch) {
            let known: Vec<String> = self.architectures.iter().map(Arch::to_string).collect();
            let compiler = self.version;
            return Err(CompileError::Arch { compiler, arch, known: known.join(", ") });
        }
        let failed = |(status, log): (Status, String)| CompileError::Failed {
            compiler: self.version,
            class: class.name(),
            arch,
            status: self.status_text(status),
            log,
        };
        let program = Running::create(&self.functions, &source()).map_err(failed)?;
        let mut options = vec![format!("--gpu-architecture={arch}")];
        options.extend(OPTIONS.map(str::to_owned));
        options.extend(class.macros().map(|(name, value)| format!("-D{name}={value}")));
        program.compile(&options).map_err(failed)?;
        program.code().map_err(failed)
    }

    fn status_text(&self, status: Status) -> String {
        // SAFETY: the function takes any status.
        let text = unsafe { (self.functions.get_error_string)(status) };
        if text.is_null() {
            return format!("status {}", status.0);
        }
        // SAFETY: it returns a string literal of the library, which stays loaded.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

fn open_library(path: &Path) -> Result<Library, String> {
    // SAFETY: the library is NVRTC as the operator has installed or named it.
    unsafe { library::open(path) }
}

fn version(functions: &Functions) -> CompilerVersion {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both pointers are to live integers.
    let status = unsafe { (functions.version)(&raw mut major, &raw mut minor) };
    assert_eq!(status, SUCCESS, "nvrtcVersion fails for null pointers only");
    CompilerVersion { major: major.unsigned_abs(), minor: minor.unsigned_abs() }
}

/// The architectures that the compiler knows; none when it does not say.
fn architectures(functions: &Functions) -> Vec<Arch> {
    let mut count = 0;
    // SAFETY: the pointer is to a live integer.
    let status = unsafe { (functions.get_num_supported_archs)(&raw mut count) };
    let count = usize::try_from(count).unwrap_or(0);
    if status != SUCCESS || count == 0 {
        return Vec::new();
    }
    let mut numbers: Vec<c_int> = vec![0; count];
    // SAFETY: the function writes as many integers as it has just said, and there is room for so many.
    let status = unsafe { (functions.get_supported_archs)(numbers.as_mut_ptr()) };
    if status != SUCCESS {
        return Vec::new();
    }
    numbers.into_iter().map(|number| Arch(number.unsigned_abs())).collect()
}

/// One program, destroyed with its owner.
struct Running<'a> {
    functions: &'a Functions,
    program: Program,
}

impl<'a> Running<'a> {
    fn create(functions: &'a Functions, source: &str) -> Result<Self, (Status, String)> {
        let source = CString::new(source).expect("the source has no NUL");
        let mut program = ptr::null_mut();
        // SAFETY: both texts end in NUL and outlive the call, which copies them; no header is given.
        let status = unsafe {
            (functions.create_program)(
                &raw mut program,
                source.as_ptr(),
                c"state_copy.cu".as_ptr(),
                0,
                ptr::null(),
                ptr::null(),
            )
        };
        if status != SUCCESS {
            return Err((status, String::new()));
        }
        Ok(Self { functions, program })
    }

    fn compile(&self, options: &[String]) -> Result<(), (Status, String)> {
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()).expect("an option has no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).expect("a handful of options");
        // SAFETY: the program is live, and `pointers` holds `count` texts that end in NUL and outlive the call.
        let status =
            unsafe { (self.functions.compile_program)(self.program, count, pointers.as_ptr()) };
        if status == SUCCESS { Ok(()) } else { Err((status, self.log())) }
    }

    fn code(&self) -> Result<Vec<u8>, (Status, String)> {
        self.output(self.functions.get_cubin_size, self.functions.get_cubin)
            .map_err(|status| (status, String::new()))
    }

    fn log(&self) -> String {
        let log =
            self.output(self.functions.get_log_size, self.functions.get_log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let log = log.trim_end_matches('\0').trim();
        let end = log.floor_char_boundary(LOG_BYTES_MAX);
        log[..end].to_owned()
    }

    fn output(
        &self,
        size_of: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, Status> {
        let mut bytes = 0;
        // SAFETY: the program is live, and the pointer is to a live integer.
        let status = unsafe { size_of(self.program, &raw mut bytes) };
        if status != SUCCESS {
            return Err(status);
        }
        let mut output = vec![0_u8; bytes];
        // SAFETY: the function writes as many bytes as it has just said, and there is room for so many.
        let status = unsafe { get(self.program, output.as_mut_ptr().cast()) };
        if status == SUCCESS { Ok(output) } else { Err(status) }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is live, and nobody uses it after this.
        let _gone = unsafe { (self.functions.destroy_program)(&raw mut self.program) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_sm_and_a_number() {
        for text in ["sm_75", "sm_80", "sm_90", "sm_100", "sm_121"] {
            assert_eq!(text.parse::<Arch>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "sm_",
            "sm_9",
            "sm_90a",
            "sm_090",
            "sm_1000",
            "compute_90",
            "90",
            "SM_90",
            " sm_90",
            "sm_+9",
        ] {
            let error = text.parse::<Arch>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("{text:?} is no architecture")), "{error}");
        }
        assert_eq!(Arch::of_capability(9, 0).to_string(), "sm_90");
        assert_eq!(Arch::of_capability(10, 3).to_string(), "sm_103");
    }

    #[test]
    fn a_missing_compiler_is_a_refusal_that_names_it_and_the_way_out() {
        let nowhere = tempfile::tempdir().unwrap();
        let error = Compiler::open(Some(nowhere.path())).unwrap_err();
        let refusal = Refusal::from(error);
        assert_eq!(refusal.code(), RefusalCode::PrepareFailed);
        assert!(refusal.sentence().starts_with("NVRTC cannot be loaded: "), "{refusal}");
        assert!(refusal.sentence().contains("libnvrtc.so.12"), "{refusal}");
        for way in ["cuda.nvrtc_directory", "statecopy kernels build"] {
            assert!(refusal.remedy().contains(way), "{refusal}");
        }
    }

    #[test]
    fn the_source_is_whole_and_its_hash_follows_it() {
        let source = source();
        for part in [
            "#define THREADS 128\n",
            "gather_int64(",
            "byte_copy(",
            "static_assert(sizeof(Arguments) == 1376",
        ] {
            assert!(source.contains(part), "{part}");
        }
        assert!(!source.contains('\0'));
        assert_eq!(source_hash().len(), 64);
    }
}
