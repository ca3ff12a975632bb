//! The CUDA device: device memory that workers share, copied by kernels of this process.

pub mod arguments;
#[expect(dead_code, reason = "the table comes before those who call it")]
mod sys;
