//! [`Kernel`]: code for GPUs that a crate brings, and the copy kernel. `scripts/build_kernels.py` compiles them.

use std::ffi::CStr;

/// Compiled code of one source.
#[derive(Debug)]
pub struct Module {
    /// Name of the source.
    pub name: &'static str,
    /// Machine code for devices of compute capability 8.0, 9.0 and 10.0, and for later minor numbers.
    pub machine_code: [((u32, u32), &'static [u8]); 3],
    /// PTX for all other devices, which the driver compiles. It ends in a zero.
    pub ptx: &'static str,
}

/// A kernel of a module. A kernel is known by its entry, so no two have the same.
#[derive(Debug)]
pub struct Kernel {
    /// The module that has it.
    pub module: &'static Module,
    /// Name in the module.
    pub entry: &'static CStr,
    /// Threads of a block; it is compiled for no more.
    pub threads: u32,
}

/// The size of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// Number of thread blocks.
    pub blocks: u32,
    /// Bytes of shared memory of a block that the kernel shares out itself.
    pub shared_bytes: u32,
}

/// Blocks of a kernel that run at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Residency {
    /// Blocks on a multiprocessor; 0: it has no room for one.
    pub each: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
}

/// The code that `scripts/build_kernels.py` made of a source, as a [`Module`]. The path is that of the source, without `.cu`.
#[macro_export]
macro_rules! compiled {
    ($name:literal, $path:literal) => {{
        /// Machine code as an object file, whose parts are aligned.
        #[repr(C, align(16))]
        struct Aligned<T: ?Sized>(T);
        static SM_80: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!($path, ".sm_80.cubin")));
        static SM_90: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!($path, ".sm_90.cubin")));
        static SM_100: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!($path, ".sm_100.cubin")));
        $crate::Module {
            name: $name,
            machine_code: [((8, 0), &SM_80.0), ((9, 0), &SM_90.0), ((10, 0), &SM_100.0)],
            ptx: concat!(include_str!(concat!($path, ".ptx")), "\0"),
        }
    }};
}

impl Module {
    /// The image for a device of this compute capability. Machine code runs on devices of its own major number with at least its
    /// minor number.
    pub(crate) fn image(&self, (major, minor): (u32, u32)) -> &'static [u8] {
        let runs = |((its_major, its_minor), _): &((u32, u32), _)| *its_major == major && *its_minor <= minor;
        let best = self.machine_code.into_iter().filter(runs).max_by_key(|(capability, _)| *capability);
        best.map_or(self.ptx.as_bytes(), |(_, code)| code)
    }
}

static COPIES: Module = compiled!("copy", "../kernels/copy");

/// Copies the pieces of a table. Parameters: the table's address (u64) and its length (u32).
pub static COPY: Kernel = Kernel { module: &COPIES, entry: c"kvlane_copy", threads: 512 };

/// Checks for a test that a module is what the script makes of its sources: `made_from` is the `.json` that it wrote, `sources`
/// are names and contents.
///
/// # Panics
/// With the advice to run the script, if it is not.
#[doc(hidden)]
pub fn assert_is_compiled_from(
    module: &Module,
    made_from: &str,
    sources: &[(&str, &str)],
    digest: impl Fn(&[u8]) -> String,
) {
    let stands = |name: &str, bytes: &[u8]| {
        let line = format!("\"{name}\": \"{}\"", digest(bytes));
        assert!(made_from.contains(&line), "{name} is another one: run scripts/build_kernels.py");
    };
    sources.iter().for_each(|(name, content)| stands(name, content.as_bytes()));
    for ((major, minor), code) in module.machine_code {
        stands(&format!("{}.sm_{major}{minor}.cubin", module.name), code);
        assert!(code.starts_with(b"\x7fELF") && code.as_ptr().addr().is_multiple_of(16));
    }
    let ptx = module.ptx.strip_suffix('\0').unwrap_or(module.ptx);
    stands(&format!("{}.ptx", module.name), ptx.as_bytes());
    // The PTX version of CUDA 12.8, which is the oldest driver that has to read it, and the oldest supported architecture.
    assert!(ptx.contains(".version 8.7\n") && ptx.contains(".target sm_80\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = include_str!("../kernels/copy.cu");

    #[test]
    fn the_copy_kernel_was_compiled_from_this_source() {
        let digest = |bytes: &[u8]| format!("{:032x}", xxhash_rust::xxh3::xxh3_128(bytes));
        assert_is_compiled_from(
            &COPIES,
            include_str!("../kernels/copy.json"),
            &[("copy.cu", SOURCE)],
            digest,
        );
    }

    #[test]
    fn a_device_gets_machine_code_of_its_major_number_or_ptx() {
        let chosen = |major, minor| COPIES.image((major, minor)).as_ptr();
        let [sm_80, sm_90, sm_100] = COPIES.machine_code.map(|(_, code)| code.as_ptr());
        for (capability, code) in [
            ((8, 0), sm_80),
            ((8, 6), sm_80),
            ((8, 9), sm_80),
            ((9, 0), sm_90),
            ((10, 0), sm_100),
            ((10, 3), sm_100),
        ] {
            assert_eq!(chosen(capability.0, capability.1), code, "{capability:?}");
        }
        for (major, minor) in [(7, 5), (11, 0), (12, 0), (12, 1)] {
            assert_eq!(chosen(major, minor), COPIES.ptx.as_ptr(), "{major}.{minor}");
        }
    }

    #[test]
    fn the_kernel_expects_the_table_and_the_block_that_we_give_it() {
        assert!(SOURCE.contains(&format!("kThreads = {};", COPY.threads)));
        assert!(SOURCE.contains(&format!("{}(", COPY.entry.to_str().unwrap())));
        assert_eq!(size_of::<crate::driver::TableEntry>(), 24);
        assert!(SOURCE.contains("static_assert(sizeof(Entry) == 24"));
    }
}
