//! A compiler that looks at nothing but its options. Its code names the chip that it is for.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::CUresult;
use crate::functions::Function;
use crate::process;

/// How the code begins.
pub(crate) const CODE: &[u8] = b"\x7fELFstub-sm_";

/// The chips that the compiler knows.
pub(crate) const ARCHITECTURES: [u32; 3] = [80, 90, 100];

/// `nvrtcResult`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i32);

impl Status {
    pub(crate) const SUCCESS: Self = Self(0);
    pub(crate) const INVALID_INPUT: Self = Self(3);
    pub(crate) const INVALID_PROGRAM: Self = Self(4);
    pub(crate) const INVALID_OPTION: Self = Self(5);
    pub(crate) const COMPILATION: Self = Self(6);
}

/// A program, and what came of compiling it.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) log: Vec<u8>,
    pub(crate) code: Vec<u8>,
}

/// Programs by their handles.
#[derive(Debug, Default)]
pub(crate) struct Programs {
    programs: BTreeMap<u64, Program>,
    last: u64,
}

/// Those of this process.
pub(crate) fn programs() -> MutexGuard<'static, Programs> {
    static PROGRAMS: Mutex<Programs> = Mutex::new(Programs { programs: BTreeMap::new(), last: 0 });
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Programs {
    pub(crate) fn add(&mut self) -> u64 {
        self.last += 1;
        self.programs.insert(self.last, Program::default());
        self.last
    }

    pub(crate) fn get(&mut self, program: u64) -> Result<&mut Program, Status> {
        self.programs.get_mut(&program).ok_or(Status::INVALID_PROGRAM)
    }

    pub(crate) fn remove(&mut self, program: u64) -> Result<(), Status> {
        self.programs.remove(&program).map(drop).ok_or(Status::INVALID_PROGRAM)
    }
}

/// Compiles: meets the faults that a test asked for, and is a call of the process's log once the driver is initialised.
pub(crate) fn compile(program: u64, options: &[Vec<u8>]) -> Result<(), Status> {
    let mut programs = programs();
    let program = programs.get(program)?;
    let met = process::outside(Function::nvrtcCompileProgram, &[options.len() as u64]);
    if let Err(CUresult(code)) = met {
        program.log = b"The stub compiler was told to fail\0".to_vec();
        return Err(Status(code));
    }
    let architecture = options.iter().find_map(|each| each.strip_prefix(b"--gpu-architecture=sm_"));
    let known = architecture
        .filter(|wanted| ARCHITECTURES.iter().any(|known| known.to_string().as_bytes() == *wanted));
    let Some(known) = known else {
        program.log = b"The stub compiler does not know the architecture\0".to_vec();
        return Err(Status::INVALID_OPTION);
    };
    program.log = vec![0];
    program.code = [CODE, known, b" ", &options.join(&b' '), b"\0"].concat();
    Ok(())
}

/// The chip that code of this compiler is for; `byte` gives the image's bytes. `None` for code of another compiler.
pub(crate) fn architecture_of(byte: impl Fn(usize) -> u8) -> Option<u32> {
    // One by one: an image of something else may end anywhere, but not before it differs.
    if !CODE.iter().enumerate().all(|(place, expected)| byte(place) == *expected) {
        return None;
    }
    let digits = (CODE.len()..).map(byte).take_while(u8::is_ascii_digit);
    Some(digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0')))
}
