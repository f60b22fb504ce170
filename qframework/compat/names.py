"""The private and unstable names that the package uses, one row each; tests/compat checks every row.

A path says where the name is looked up; an attribute's path includes the class of its owner. Names that are strings,
such as keys of a node's ``meta``, are listed with the module whose source writes them.
"""

from __future__ import annotations

from typing import NamedTuple

# The oldest and newest versions that the tests have passed with.
KNOWN = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "torchao": ("0.17", "0.18"),
    "transformers": ("5", "5.24"),
    "diffusers": ("0.39", "0.42"),
}


class Name(NamedTuple):
    """A name that another library may rename or remove without notice."""

    path: str
    breaks: str  # what does not work without it
    instead: str = ""  # what happens without it; empty: an error
    source: str = ""  # for a string: the module that writes it
    older: str = ""  # its last part in older versions; either will do
    until: str = ""  # the first version of the library that does not need it

    @property
    def library(self) -> str:
        return (self.source or self.path).partition(".")[0]


_FUNCTORCH = "transforms of torch.func cannot be distinguished from plain calls, and would give wrong derivatives"
_FORWARD = "forward-mode derivatives cannot be distinguished from plain calls, and would be dropped"
_BELOW_AUTOGRAD = "gradients of attention cannot be computed below autograd"
_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
_NO_GLUON = "kernels in Gluon cannot be compiled"
_PLAIN_TRITON = "plain Triton kernels replace those for Hopper"
_SAVED = "saved models cannot be read"
_SCOPES = "a scope of torch.autocast in a graph would be taken for a write to every tensor"
_BLOCKS = "INT8 training cannot compute in blocks (BlockTensor)"
_PERSISTENT = "Inductor quantizes the rows of windows many times as slowly"
_NO_SITES = "code that Inductor generated cannot call operators past the dispatcher"
_DISPATCHED = "it calls them through the dispatcher, which takes the host about 7 us longer for each call"
_LATE = "the processes that compile Triton kernels start late, and kernels are compiled one after the other"
_NO_PROCESS = "whether a user wants nothing compiled in other processes is unknown, and compilation fails"
_IN_FORKS = "forks of the process cannot compile kernels, and first calls take longer"
_IN_THREADS = "kernels are compiled in threads"
_UNSEEN_BY_PROTON = "Triton's profiler would miss kernels that forks compile"
_ONE_AFTER_THE_OTHER = "forks of the process cannot compile Inductor's kernels, and first calls take longer"
_IN_ORDER_UNTIL = "they are compiled one after the other until Inductor's processes are ready"
_LAUNCHERS = "launchers are compiled one after the other, and first calls under CUDA graphs take longer"
_TUNED = "repeated blocks would be cut where Inductor fuses products that it tunes"
_WRAPPERS = "repeated blocks would be outlined where Inductor's code cannot call them, and compilation fails"
_EARLY = "kernels of Inductor cannot be launched before the one before them is done, which takes CUDA graphs longer"
_IN_ORDER = "they are launched one after the other"
_PYTREE = "nested inputs and outputs of models cannot be flattened"
_OPTIONS = "options and modes of torch.compile(backend='qframework') cannot be checked"
_CONVERTED = "modules cannot be converted to INT8 training in place"
_HOOKS = "hooks of converted modules cannot be found, and INT8 training would skip them"
_FUSED = "cuDNN's attention cannot compute gradients of a quantized forward pass (backward='mixed')"
_INT8_OPERATORS = "operators of INT8 training cannot be compiled by Inductor of this version"
_PT2E = "convert_pt2e cannot write the operators of qframework"
_SAM = "SAM's image encoder in transformers cannot get attn_implementation='qframework'"
_MASKS = "models of transformers cannot get attn_implementation='qframework': what a missing mask means is unknown"
_CACHE = "models of transformers cannot keep keys and values in INT8 (Int8Cache)"
_QUANTIZER = "models of transformers cannot be quantized while they are loaded (QFrameworkConfig)"
_DIFFUSERS_ATTENTION = "use_sage_attention does not count calls of other attention backends of diffusers"
_DIFFUSERS = "models of diffusers cannot be quantized while they are loaded (QFrameworkConfig)"
_COMPILED = "a compiled model cannot be distinguished from the model itself"
_TRITON_LAUNCH = "Triton kernels cannot be launched"
_EXPLAIN = "explain cannot find a compiled model's options"
_SKIPS = "explain and the log cannot tell which code Dynamo skips, or why"
_UNTOLD = "layers in it run in float, and nothing says so"
_NO_CPP = "the C++ compiler of Inductor is unknown"
_ANNOTATE = "QFrameworkQuantizer cannot annotate a graph"
_SUBCLASS = "compiled INT8 training cannot pass gradients in blocks from one layer to the next"
_DIRECT = "layers of quantize_ cannot call kernels without the dispatcher in eager mode"
_DISPATCHED = "each of their operators is called through it, which takes twice as long"

_ROWS = (
    # dispatch.py
    Name("torch._C._are_functorch_transforms_active", _FUNCTORCH),
    Name("torch._C._functorch.is_functorch_wrapped_tensor", _FUNCTORCH),
    Name("torch._C._functorch.get_unwrapped", _FUNCTORCH),
    Name("torch._C._functorch.is_gradtrackingtensor", _FUNCTORCH),
    Name("torch._C._functorch.is_legacy_batchedtensor", _FUNCTORCH),
    Name("torch._C._functorch.is_batchedtensor", _FUNCTORCH),
    Name("torch._C._is_fwd_grad_enabled", _FORWARD),
    Name("torch._C._dispatch_tls_is_dispatch_key_excluded", _FORWARD),
    Name("torch._dispatch.python.enable_python_dispatcher", "nodes added to exported models have no shapes"),
    Name("torch._functorch.eager_transforms.JVP_NESTING", _FORWARD),
    Name("torch.autograd.forward_ad._current_level", _FORWARD),
    Name("torch._subclasses.functional_tensor.FunctionalTensor", _BLOCKS),
    Name(
        "torch.nested._internal.nested_tensor.NestedTensor",
        "operators cannot refuse nested tensors by name in inference mode",
    ),
    Name("torch.Tensor._make_subclass", _BLOCKS),
    Name("torch._C._functorch.peek_interpreter_stack", _FUNCTORCH),
    Name("torch._C._SetExcludeDispatchKeyGuard", _BELOW_AUTOGRAD),
    Name("torch._C.DispatchKey.AutogradFunctionality", _BELOW_AUTOGRAD),
    Name("torch._C.DispatchKey.ADInplaceOrView", _BELOW_AUTOGRAD),
    Name(
        "torch._C._AutoDispatchBelowAutograd",
        "compiled INT8 models on the CPU cannot skip autograd",
        "they run through autograd, which costs a little host time",
    ),
    Name(
        "torch._C._current_graph_task_id",
        "INT8 training cannot detect a backward pass",
        "gradients are copied when autograd converts their dtype",
    ),
    Name(
        "torch._C._cuda_getCurrentRawStream",
        "replayed calls on a GPU find the current stream more slowly",
        "torch.cuda.current_stream finds it",
    ),
    Name(
        "torch._C._dynamo.guards._empty_strided_cuda",
        "replayed calls on a GPU cannot use the fast allocation",
        "torch.empty_strided allocates, which takes twice as long",
    ),
    Name(
        "torch._C._autograd._profiler_enabled",
        "PyTorch's profiler does not show operators of compiled models",
        "it shows their kernels alone",
    ),
    Name(
        "torch._C._dynamo.guards.TensorGuards",
        "repeated calls of operators cannot be recognised in C++",
        "their tensors are compared in Python, which takes twice as long",
    ),
    Name("torch._C._len_torch_dispatch_stack", _DIRECT, _DISPATCHED),
    Name("torch._C._len_torch_function_stack", _DIRECT, _DISPATCHED),
    Name("torch._C._dispatch_tls_local_include_set", _DIRECT, _DISPATCHED),
    Name("torch._C.DispatchKeySet", _DIRECT, _DISPATCHED),
    Name("torch._C.DispatchKey.BackendSelect", _DIRECT),
    Name("torch._C._set_grad_enabled", "compiled INT8 models keep nodes that switch gradients on and off"),
    Name("torch.amp._enter_autocast", _SCOPES),
    Name("torch.amp._exit_autocast", _SCOPES),
    Name("torch._C._disabled_torch_function_impl", _BLOCKS),
    Name(
        "torch._C.DisableTorchFunctionSubclass", "writes to the dequantized weight of an INT8 layer cannot be detected"
    ),
    Name("torch.Tensor._make_wrapper_subclass", _BLOCKS),
    Name(
        "torch._C._set_throw_on_mutable_data_ptr",
        "C++ code that takes the memory of a BlockTensor gets no error",
        "it reads a null pointer",
    ),
    Name("torch.Tensor._version", "writes to a float copy of a BlockTensor cannot be detected"),
    Name("torch.storage.UntypedStorage._cdata", "tensors that share memory cannot be detected in a graph"),
    Name("torch._subclasses.fake_tensor.FakeTensor", "captured graphs cannot be lowered"),
    Name("torch._subclasses.fake_tensor.FakeTensorMode", "the writes of a node in a graph cannot be determined"),
    Name("torch.utils._python_dispatch.TorchDispatchMode", "calls on a GPU cannot be recorded, nor writes observed"),
    Name(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
        "PyTorch cannot say which parameters are tensor subclasses",
        "those with __tensor_flatten__ count as subclasses",
    ),
    # functions.py
    Name("torch.overrides._get_current_function_mode", "attention scopes of single layers do not work"),
    Name("torch.overrides._get_current_function_mode_stack", "attention scopes do not count what they cannot quantize"),
    *(
        Name(
            f"has_torch_function in {function}",
            f"{function} cannot run inside a scope of attention",
            "its attention stays in PyTorch",
            source=source,
        )
        for function, source in {
            "torch.nn.functional.multi_head_attention_forward": "torch.nn.functional",
            "torch.Tensor.backward": "torch._tensor",
            "torch.autograd.backward": "torch.autograd",
            "torch.autograd.grad": "torch.autograd",
        }.items()
    ),
    # operators.py
    Name("torch._ops.OpOverload._schema", "an operator's arguments and mutations cannot be read"),
    Name("torch.ops.aten._assert_tensor_metadata", "attention in exported models cannot be found beside assertions"),
    Name("torch.ops.aten._has_compatible_shallow_copy_type", "writes to x.data of a BlockTensor cannot be detected"),
    Name("torch.ops.aten._scaled_dot_product_cudnn_attention_backward", _FUSED, "Triton kernels"),
    Name("torch.ops.aten._pin_memory", "FSDP2 cannot keep weights that it gathers in INT8 on the CPU"),
    Name("torch.ops.aten._to_copy", "BlockTensors cannot stay in INT8 when their dtype changes"),
    Name("torch.ops.aten._unsafe_view", "BlockTensors cannot stay in INT8 when they are viewed"),
    Name("torch.ops.aten._reshape_alias", "BlockTensors cannot stay in INT8 when they are viewed"),
    Name("torch._C._nn", "functions of torch.nn.functional that are written in C++ cannot be recognized in graphs"),
    Name("torch._int_mm", "the CPU has no INT8 product", "a float product of the same integers is used"),
    Name("torch._C._dispatch_has_kernel", f"{_SAVED}: operators and functions that access files look the same"),
    Name("torch._C._dispatch_get_all_op_names", _INT8_OPERATORS, until="2.15"),
    Name("torch.ao.quantization.fx._decomposed", "graphs of PT2E (quantized_decomposed) cannot be read or written"),
    # modules.py
    *(Name(f"torch.nn.modules.module.Module.{name}", _CONVERTED) for name in ("_buffers", "_modules", "_parameters")),
    *(
        Name(f"torch.nn.modules.module.Module.{name}", _HOOKS)
        for name in (
            "_backward_hooks",
            "_backward_pre_hooks",
            "_forward_hooks",
            "_forward_hooks_always_called",
            "_forward_pre_hooks",
            "_forward_pre_hooks_with_kwargs",
        )
    ),
    # graphs.py
    Name(
        "torch.fx.node.Node._erased",
        "torch.fx cannot say which nodes were erased",
        "the whole graph is searched",
    ),
    Name(
        "torch.fx.graph_module.GraphModule._register_deepcopy_hook",
        "copies of quantized models would give wrong gradients",
    ),
    Name("torch.fx.graph.Graph._codegen", "the names and nesting of an exported model's inputs cannot be read"),
    Name("torch.fx.experimental.proxy_tensor.make_fx", "nn.MultiheadAttention cannot be lowered in compiled models"),
    Name("torch.fx.experimental.symbolic_shapes.free_unbacked_symbols", "graphs with symbolic sizes cannot be lowered"),
    Name("torch.fx.experimental.symbolic_shapes.statically_known_true", "graphs with symbolic sizes cannot be lowered"),
    # pytree.py
    *(
        Name(f"torch.utils._pytree.{name}", _PYTREE)
        for name in (
            *("TreeSpec", "tree_any", "tree_leaves", "tree_map", "tree_map_only", "tree_structure", "tree_unflatten"),
        )
    ),
    *(
        Name(f"torch.utils._pytree.{name}", _SAVED)
        for name in ("SERIALIZED_TYPE_TO_PYTHON_TYPE", "SUPPORTED_SERIALIZED_TYPES", "treespec_loads")
    ),
    # export.py
    Name("torch._export.serde.schema.ExportedProgram", _SAVED),
    Name("torch._export.serde.serialize.ExportedProgramDeserializer", _SAVED),
    Name("torch._export.serde.serialize._dict_to_dataclass", _SAVED),
    # dynamo.py
    Name("torch._guards.TracingContext.try_get", "a backend cannot detect whether Dynamo is compiling"),
    Name("torch.compiler._is_exporting_flag", "a compilation cannot be told from an export"),
    Name("torch._dynamo.guards.GuardBuilder.ID_MATCH", "frozen weights cannot be guarded against being replaced"),
    Name("torch._dynamo.guards.install_guard", "frozen weights cannot be guarded against being replaced"),
    Name("torch._dynamo.source.ConstantSource", "constants cannot be added to a graph that Dynamo captured"),
    Name(
        "torch._dynamo.config.optimize_ddp",
        "DDPOptimizer cannot be switched off",
        "DDPOptimizer may split compiled INT8 training in DistributedDataParallel where it must not",
    ),
    Name(
        "torch._functorch.config.enable_autograd_cache",
        "AOTAutograd's cache cannot be switched off",
        "compiled optimizers may crash on weights that FSDP2 gathers in INT8",
    ),
    Name("torch._dynamo.eval_frame.OptimizedModule._orig_mod", _COMPILED),
    Name("torch._dynamo.eval_frame.OptimizedModule.dynamo_ctx", _EXPLAIN),
    Name("_torchdynamo_orig_backend", _EXPLAIN, source="torch._dynamo.eval_frame"),
    Name("compiler_name", _EXPLAIN, source="torch"),
    Name(
        "_param_name_to_source",
        "Dynamo's graphs have no list of sources for a new constant",
        "constants are added without a source",
        source="torch._dynamo.output_graph",
    ),
    Name(
        "grapharg",
        "Dynamo's graphs do not say what their inputs stand for",
        "frozen weights are not guarded against being replaced, and layers lose their names in reports",
        source="torch._dynamo.output_graph",
    ),
    Name(
        "example_value",
        "Dynamo's graphs do not record the values of their nodes",
        "linears and attention whose shapes are unknown stay in float",
        source="torch._dynamo.utils",
    ),
    *(
        Name(
            name,
            "Dynamo's graphs do not say which inputs are buffers of modules",
            "layers whose scales or weights are buffers stay as PT2E wrote them",
            source="torch._dynamo.variables.builder",
        )
        for name in ("tensor_dict", "_dynamo_static_input_type")
    ),
    # graph_breaks.py
    Name("torch._dynamo.callback.callback_handler", _SKIPS),
    Name("torch._dynamo.callback.callback_handler.end_callbacks", _SKIPS),
    Name("torch._dynamo.callback.callback_handler.register_end_callback", _SKIPS),
    Name("torch._dynamo.callback.callback_handler.remove_end_callback", _SKIPS),
    Name("torch._dynamo.utils.counters", _SKIPS),
    Name("compile_subgraph_reason", _SKIPS, _UNTOLD, source="torch._dynamo.output_graph"),
    Name("unimplemented", _SKIPS, _UNTOLD, source="torch._dynamo.exc"),
    Name("graph_break", _SKIPS, _UNTOLD, source="torch._dynamo.symbolic_convert"),
    Name("real_stack", _SKIPS, _UNTOLD, source="torch._dynamo.exc"),
    Name("compiler_fn", _SKIPS, _UNTOLD, source="torch._dynamo.convert_frame"),
    # call_sites.py
    Name("torch._inductor.ir.FallbackKernel", _NO_SITES, _DISPATCHED),
    Name("torch._inductor.ir.IRNode", _NO_SITES, _DISPATCHED),
    Name("torch._inductor.ir.TensorBox", _NO_SITES, _DISPATCHED),
    Name("torch._inductor.lowering.register_lowering", _NO_SITES, _DISPATCHED),
    Name("torch._inductor.ir.FallbackKernel.create", _NO_SITES, _DISPATCHED),
    Name("cpp_wrapper", "call sites would be written into C++", source="torch._inductor.graph"),
    Name("_is_fallback_handler", "Inductor takes call sites for its own code", source="torch._inductor.lowering"),
    # early_launch.py
    Name("torch._inductor.codegen.triton.TritonKernel._filter_pdl", _EARLY, _IN_ORDER),
    Name("torch._inductor.codegen.triton.TritonKernel._enable_pdl_codegen", _EARLY),
    Name("torch._inductor.codegen.triton.TritonKernel.GDC_WAIT", _EARLY),
    Name("torch._inductor.codegen.triton.TritonKernel.GDC_LAUNCH", _EARLY),
    Name("_lines", _EARLY, source="torch._inductor.utils"),
    # launchers.py
    Name("triton_meta", _LAUNCHERS, source="torch._inductor.codegen.triton"),
    *(
        Name(f"triton.backends.nvidia.driver.{name}", _LAUNCHERS, until="3.7")
        for name in ("make_launcher", "compile_module_from_src", "include_dirs", "libraries", "library_dirs")
    ),
    # subgraphs.py
    Name(
        "gen_schema",
        "the schema of repeated blocks cannot be shared",
        "each block is traced twice, and a model's first call takes about a tenth longer",
        source="torch._higher_order_ops.invoke_subgraph",
    ),
    # inductor.py
    Name("torch._inductor.async_compile.AsyncCompile.process_pool", _ONE_AFTER_THE_OTHER, _IN_ORDER_UNTIL),
    Name("torch._inductor.async_compile.AsyncCompile.use_process_pool", _ONE_AFTER_THE_OTHER, _IN_ORDER_UNTIL),
    Name("torch._inductor.config.triton.proton_profiling", _UNSEEN_BY_PROTON, "it is taken for off"),
    Name("torch._inductor.async_compile.maybe_warm_pool", _LATE, "Inductor starts them when a graph is lowered"),
    Name("torch._inductor.config.compile_threads", _NO_PROCESS),
    Name("torch._inductor.config.cpp_wrapper", _WRAPPERS),
    Name("torch._inductor.config.fx_wrapper", _WRAPPERS),
    Name("torch._inductor.config.max_autotune", _TUNED),
    Name("torch._inductor.config.max_autotune_gemm", _TUNED),
    Name("torch._inductor.compile_fx.compile_fx", "backend='qframework' cannot compile a model"),
    Name("torch._inductor.compile_fx.compile_fx_inner", "backend='qframework' cannot compile a model"),
    Name("torch._inductor.decomposition.select_decomp_table", "backend='qframework' cannot compile a model"),
    *(
        Name(f"torch.{name}", "models cannot be compiled to packages of AOTInductor, nor these be loaded")
        for name in (
            "_inductor.aoti_compile_and_package",
            "_C._aoti.AOTIModelPackageLoader.get_call_spec",
            "_C._aoti.AOTIModelPackageLoader.load_metadata_from_package",
            "export.pt2_archive._package.AOTICompiledModel",
        )
    ),
    Name("torch._inductor.choices.InductorChoices.should_use_persistent_reduction", _PERSISTENT),
    Name("torch._inductor.virtualized.V.set_choices_handler", _PERSISTENT),
    Name("torch._inductor.sizevars.SizeVarAllocator.statically_known_leq", _PERSISTENT),
    Name("torch._inductor.codegen.simd_kernel_features.SIMDKernelFeatures.scheduler_nodes", _PERSISTENT),
    Name("torch._inductor.list_mode_options", _OPTIONS),
    Name("torch._inductor.list_options", _OPTIONS),
    Name("torch._inductor.lowering.lowerings", _INT8_OPERATORS, until="2.15"),
    Name("torch._inductor.lowering.make_fallback", _INT8_OPERATORS, until="2.15"),
    Name("torch._inductor.lowering.tag_to_layout_constraint", _INT8_OPERATORS, until="2.15"),
    Name("torch._library.utils.get_layout_constraint_tag", _INT8_OPERATORS, until="2.15"),
    Name("torch._inductor.cpp_builder.get_cpp_compiler", _NO_CPP, "qframework doctor shows none"),
    Name("torch._inductor.exc.InvalidCxxCompiler", _NO_CPP, "qframework doctor shows none"),
    Name(
        "torch._inductor.codecache.CppCodeCache.load",
        "the product for processors without VNNI cannot be compiled",
        "a float product of the same integers is used",
    ),
    # BlockTensor's own methods, which AOTAutograd calls by name
    Name("__coerce_tangent_metadata__", _SUBCLASS, source="torch._functorch._aot_autograd.collect_metadata_analysis"),
    Name("__coerce_same_metadata_as_tangent__", _SUBCLASS, source="torch._functorch._aot_autograd.runtime_wrappers"),
    # memos.py
    *(
        Name(
            f"{function}.cache_clear",
            "PT2E's memo of float models cannot be emptied",
            "float models may stay in memory until the process ends",
        )
        for function in (
            "torch.ao.quantization.fx.utils.assert_and_get_unique_device",
            "torchao.utils._assert_and_get_unique_device",
        )
    ),
    # triton.py
    Name("triton.runtime.errors.OutOfResources", "a tile that needs too much shared memory cannot be replaced"),
    Name("triton.tools.tensor_descriptor.TensorDescriptor", "Triton kernels cannot load by TMA"),
    Name(
        "triton.tools.tensor_descriptor.TensorDescriptor.__dict__",
        "descriptors cannot be copied without a check",
        "they are checked at every call",
    ),
    Name("triton.runtime.driver.active.get_current_target", "the chip that Triton compiles for is unknown"),
    Name("triton.runtime.driver.set_active", _IN_FORKS, _IN_THREADS),
    Name("launcher_cls", _IN_FORKS, _IN_THREADS, source="triton.backends.nvidia.driver"),
    *(
        Name(f"triton.language.extra.cuda.{name}", "kernels cannot overlap", "each starts when the previous one ends")
        for name in ("gdc_wait", "gdc_launch_dependents")
    ),
    Name("triton.runtime.cache.triton_key", "first calls take longer", "Triton hashes its files later"),
    Name("triton.runtime.cache.get_cache_manager", "it is unknown whether kernels are in Triton's cache"),
    Name("triton.runtime.jit.JITFunction.warmup", "kernels cannot be compiled ahead of their first launch"),
    Name("triton.runtime.jit.JITFunction.arg_names", _TRITON_LAUNCH),
    Name("triton.compiler.compiler.CompiledKernel.__getitem__", _TRITON_LAUNCH),
    Name(
        "triton.backends.nvidia.driver.CudaLauncher",
        "repeated launches cannot skip Triton's Python",
        "every launch goes through Triton, which takes longer on the host",
    ),
    Name("triton.knobs.runtime", "profilers that ask Triton to be told of launches cannot be seen"),
    Name("triton.FutureKernel.result", "kernels cannot be awaited while another thread compiles them"),
    Name("triton.AsyncCompileMode", "kernels cannot be compiled in parallel with Inductor"),
    # gluon.py
    Name("triton.experimental.gluon", _NO_GLUON, _PLAIN_TRITON),
    Name("triton.experimental.gluon.language", _NO_GLUON, _PLAIN_TRITON),
    Name("triton.experimental.gluon.nvidia.hopper.TensorDescriptor", _NO_GLUON, _PLAIN_TRITON),
    *(
        Name(f"{_HOPPER}.{name}", _NO_GLUON, _PLAIN_TRITON)
        for name in ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
    ),
    Name(  # older: up to Triton 3.8
        "triton.experimental.gluon.language.shared_memory_descriptor.reinterpret",
        _NO_GLUON,
        _PLAIN_TRITON,
        older="_reinterpret",
    ),
    Name("triton.experimental.gluon.language.barrier", _NO_GLUON, _PLAIN_TRITON, older="thread_barrier"),  # Triton 3.6
    *(
        Name(f"{_HOPPER}.tma.{name}", _NO_GLUON, _PLAIN_TRITON, older=older)  # older: Triton 3.6
        for name, older in {
            "async_load": "async_copy_global_to_shared",
            "async_store": "async_copy_shared_to_global",
        }.items()
    ),
    # torchao.py
    *(
        Name(f"torchao.quantization.pt2e.{name}", "PT2E has no observers to build on")
        for name in (
            "AffineQuantizedObserverBase",
            "FROM_NODE_KEY",
            "FakeQuantizeBase",
            "MinMaxObserver",
            "MovingAverageMinMaxObserver",
            "MovingAveragePerChannelMinMaxObserver",
            "ObserverBase",
            "ObserverOrFakeQuantize",
            "PerChannelMinMaxObserver",
        )
    ),
    *(
        Name(f"torchao.quantization.pt2e.quantizer.{name}", _ANNOTATE)
        for name in (
            "EdgeOrNode",
            "QuantizationAnnotation",
            "QuantizationSpec",
            "QuantizationSpecBase",
            "Quantizer",
            "SharedQuantizationSpec",
        )
    ),
    Name("torchao.quantization.pt2e.quantizer.quantizer.QuantizationAnnotation._annotated", _ANNOTATE),
    Name("torchao.quantization.pt2e.quantizer.quantizer.Q_ANNOTATION_KEY", _ANNOTATE),
    Name("torchao.quantization.pt2e.quantize_pt2e.convert_pt2e", "models cannot be quantized in one call"),
    Name("torchao.quantization.pt2e.quantize_pt2e.prepare_pt2e", "models cannot be quantized in one call"),
    Name(
        "torchao.quantization.pt2e.quantize_pt2e._fold_conv_bn_qat",
        "models with batch norms cannot be quantized without a search for those that train",
        "torchao searches, which can take minutes",
    ),
    Name("torchao.quantization.pt2e.utils.create_getattr_from_value", _PT2E),
    Name(
        "_observed_graph_module_attrs",
        "a prepared model without quantized layers counts as an exported one",
        source="torchao.quantization.pt2e.convert",
    ),
    # transformers_sam.py and transformers_sam_hq.py
    Name("transformers.models.sam.modeling_sam.SAM_VISION_ATTENTION_CLASSES", _SAM),
    Name("transformers.models.sam.modeling_sam.SamVisionSdpaAttention", _SAM),
    Name("transformers.models.sam_hq.modeling_sam_hq.SAM_HQ_VISION_ATTENTION_CLASSES", _SAM),
    Name("transformers.models.sam_hq.modeling_sam_hq.SamHQVisionSdpaAttention", _SAM),
    # transformers_modules.py
    Name("transformers.modeling_utils.PreTrainedModel._supports_sdpa", _MASKS),
    Name("transformers.modeling_utils.PreTrainedModel._supports_attention_backend", _MASKS),
    # transformers_cache.py
    Name("transformers.cache_utils.Cache", _CACHE),
    Name("transformers.cache_utils.CacheLayerMixin", _CACHE),
    # quantization_configurations.py
    Name("transformers.utils.quantization_config.QuantizationConfigMixin", _QUANTIZER),
    Name("diffusers.quantizers.quantization_config.QuantizationConfigMixin", _DIFFUSERS),
    # diffusers_quantizers.py
    Name("diffusers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING", _DIFFUSERS),
    Name("diffusers.quantizers.auto.AUTO_QUANTIZER_MAPPING", _DIFFUSERS),
    Name("diffusers.quantizers.base.DiffusersQuantizer", _DIFFUSERS),
    Name("diffusers.hooks.layerwise_casting.DEFAULT_SKIP_MODULES_PATTERN", _DIFFUSERS),
    Name("diffusers.models.modeling_utils.ModelMixin._skip_layerwise_casting_patterns", _DIFFUSERS),
    # diffusers_attention.py
    Name("diffusers.models.attention_dispatch._AttentionBackendRegistry._backends", _DIFFUSERS_ATTENTION),
    # transformers_quantizers.py
    Name("transformers.core_model_loading.ConversionOps", _QUANTIZER),
    Name("transformers.quantizers.HfQuantizer", _QUANTIZER),
    Name("transformers.quantizers.register_quantization_config", _QUANTIZER),
    Name("transformers.quantizers.register_quantizer", _QUANTIZER),
    Name("_is_hf_initialized", _QUANTIZER, source="transformers.modeling_utils"),
    Name("transformers.modeling_utils.PreTrainedModel._init_weights", _QUANTIZER),
)
NAMES = {name.path: name for name in _ROWS}
